"""A training script is read as a shell would, and nothing in it is run."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.import_inputs import GRPO, imported, said, search_r1

from srl.errors import UserError
from srl.train.importing import import_file
from srl.train.importing.shell import TrainingCommand, read_script

COMMAND = "python3 -m verl.trainer.main_ppo"


def read(text: str, bare: frozenset[str] = frozenset({"max_turns"}), **defined: str) -> TrainingCommand:
    return read_script(text, "run.sh", defined, bare)


def words(text: str, **defined: str) -> list[str]:
    """The words of the training command in `text`."""
    return [word for word, _ in read(text, **defined).words]


def refused(text: str, **defined: str) -> str:
    with pytest.raises(UserError) as caught:
        read(text, **defined)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CASES = {
    "continued": "X a.b=1 \\\n   c.d=2",
    "continued in a word": "X a.b=12\\\n34",
    "tabs": "X\ta.b=1\t\tc.d=2",
    "single quotes": "X 'a.b=$HERE \\ \"q\"'",
    "double quotes": 'X "a.b=$A  $B" a.c="\\$A \\" \\\\ \\x"',
    "quotes within": "X a.b=\"['$A', '${B}']\" a.c=['wandb']",
    "escaped": "X a.b=\\$A\\ b",
    "split": "X $MANY \"$MANY\"",
    "empty": "X a.b=\"\" a.c='' $EMPTY \"$EMPTY\" a.d=$EMPTY",
    "joined": "X a.b=${A}_${B}-$A.$B/x",
    "no name": "X a.b=1$ a.c=$% 'a'$",
    "otherwise": "X ${NONE:-c.d=4} ${A:-5} ${EMPTY:-6} \"${EMPTY:-7}\" ${NONE:-8 9}",
    "otherwise nested": 'X "${NONE:-"$A/${B}"}" ${NONE:-${NONE:-deep}}',
    "sums": "X $((1024 * 2)) $(( (A + 3) * $A - ${A} )) $((7 / 2)) $((-7 / 2)) $((-7 % 3)) $((S * 2))",
    "array": "L=(a.b=1 # comment\n  'c d' \"$A\"\n)\nX \"${L[@]}\" ${L[@]}",
    "array grows": "L=(a)\nL+=(b c)\nX \"${L[@]}\"",
    "text grows": "W=a\nW+=b\nX $W",
    "comment": "# X no=1\nX a.b=1 # c.d=2\nY e.f=3",
    "sign in a word": "X a.b=c#d e.f=http://h:1/x?y=z",
    "redirected": "X a.b=1 2>&1 > out.txt c.d=2",
    "pipe": "X a.b=1 2>&1 | cat > /dev/null",
    "next": "X a.b=1; Z c.d=2 && Z e.f=3",
    "document": "cat > /dev/null <<END\nX no.such=1\nEND\nX a.b=1",
    "assigned twice": "V=1\nV=2\nX $V",
    "exported": "export V=1 W='2 3'\nX $V \"$W\"",
    "one line": "V=1; W=$V-2; X $W",
    "function": "function F() {\n  date\n}\nV=1\nX a.b=$V",
    "function, brace below": "function F\n{\n  date\n}\nV=1\nX a.b=$V",
    "function, brace behind": "function F {\n  date\n}\nV=1\nX a.b=$V",
    "function without the word": "F() {\n  date\n}\nV=1\nX a.b=$V",
    "for one command": "V=1 X a.b=1",
    "arguments": 'X a.b=1 $@ "$@"',
    "subshell": "( X a.b=1 )",
    "braces": "X a.b={c:1}",
}  # fmt: skip
PRELUDE = "A=2\nB='three'\nMANY=' a.b=1  c.d=2 '\nEMPTY=\nS=1+2\n"


@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_a_shell(name, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash to compare with")
    text = PRELUDE + CASES[name]
    functions = 'X() { for word in "$@"; do printf "%s\\0" "$word"; done >&9; }; Y() { :; }; Z() { :; }\n'
    script = f"exec 9>&1 >/dev/null\n{functions}{text}\n"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    expected = done.stdout.split("\0")[:-1]
    assert words(text.replace("X ", f"{COMMAND} ").replace("X\t", f"{COMMAND}\t")) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab=.'\"\\ #\n[]{}:,~%é", max_size=40))
def test_words_without_signs_are_those_of_the_standard_library(text):
    try:
        expected = shlex.split(text.replace("\\\n", ""), comments=True)
    except ValueError:
        return
    if "#" in text or "\\" in text:
        return
    if "\n" not in text:
        assert words(f"{COMMAND} {text}") == expected


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abX=.'\"\\ #\n[]{}()$`<>|&;:-+@*0", max_size=60))
def test_no_text_breaks_the_reader(text):
    for whole in (f"{COMMAND} a.b=1 {text}", text):
        with suppress(UserError):
            read(whole)


def test_nothing_in_a_script_is_run(tmp_path):
    mark = tmp_path / "mark"
    for text in (
        f"X=$(touch {mark})\n{COMMAND} a.b=$X",
        f"{COMMAND} a.b=`touch {mark}`",
        f"{COMMAND} a.b=$(touch {mark})",
        f"{COMMAND} 'a.b=$(touch {mark})' 'c.d=`touch {mark}`'",
        f"touch {mark}\n{COMMAND} a.b=1",
        f"{COMMAND} a.b=$((__import__('os').system('touch {mark}')))",
        f"{COMMAND} a.b=${{X:=$(touch {mark})}}",
    ):
        with suppress(UserError):
            read(text)
    assert not mark.exists()


def test_variables_without_a_value_are_named_with_what_to_type():
    line = refused(f"B=$GONE/x\n{COMMAND} a.b=$HERE/a \\\n  c.d=$B e.f=$HERE")
    assert "HERE (used in line 2)" in line
    assert "GONE (used in line 1)" in line
    assert line.endswith("type: --define HERE=VALUE --define GONE=VALUE")


@pytest.mark.parametrize(
    ("text", "words_said"),
    [
        (f"A=$(pwd)/x\n{COMMAND} a.b=$A", ("A (line 1 takes it from $(pwd))", "--define A=VALUE")),
        (f'A="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\n{COMMAND} a.b=$A/x', ("takes it from $(cd",)),
        (f"A=`date`\n{COMMAND} a.b=$A", ("line 1 takes it from `date`",)),
        (f"A=${{B%.*}}\n{COMMAND} a.b=$A", ("line 1 takes it from ${B%.*}",)),
        (f"if [ -z $A ]; then\n A=1\nfi\n{COMMAND} a.b=$A", ("inside the block that begins in line 1",)),
        (f"[ -n x ] && A=1\n{COMMAND} a.b=$A", ("A (line 1 sets it only",)),
        (f"for A in 1 2; do\n{COMMAND} a.b=$A\ndone", ("line 1 loops over it",)),
        (f"{COMMAND} a.b=$1", ("1 (used in line 1)",)),
        (f"{COMMAND} a.b=$(nproc)", ("$(nproc)", "write the value there")),
        (f"{COMMAND} a.b=${{A:?}}", ("the value of ${A:?} (used in line 1) is unknown", "write the value")),
        (f"A=1\nB=${{A:+2}}\n{COMMAND} a.b=$B", ("B (line 2 takes it from ${A:+2})", "--define B=VALUE")),
        (f"B=${{A:=2}}\n{COMMAND} a.b=$B", ("B (line 1 takes it from ${A:=2})",)),
        (f"B=${{A-2}}\n{COMMAND} a.b=$B", ("B (line 1 takes it from ${A-2})",)),
        (f"{COMMAND} a.b=$((A * 2))", ("A (used in line 1)",)),
        (f"A=x\n{COMMAND} a.b=$((A * 2))", ("$((A * 2))",)),
    ],
)  # fmt: skip
def test_value_that_only_running_would_tell_is_asked_for(text, words_said):
    line = refused(text)
    assert all(part in line for part in words_said), line


def test_given_value_counts_whatever_the_script_says():
    assert words(f"A=1\nif x; then A=2; fi\n{COMMAND} a.b=$A c.d=$B", A="9", B="") == ["a.b=9", "c.d="]


def test_value_for_a_variable_that_is_not_there_is_refused():
    line = refused(f"DATA_DIR=x\n{COMMAND} a.b=$DATA_DIR", DATA_DRI="y")
    assert "--define DATA_DRI: run.sh has no such variable; did you mean 'DATA_DIR'?" in line


def test_variable_that_no_setting_needs_may_be_without_a_value():
    assert words(f"LOG=$(date).log\n{COMMAND} --config-path=$HERE a.b=1 2>&1 | tee $LOG") == [
        "--config-path=",
        "a.b=1",
    ]


def test_command_may_be_submitted_to_ray():
    text = f"ray job submit --address=$THERE --no-wait -- \\\n  {COMMAND} a.b=1"
    assert words(text) == ["a.b=1"]


def test_script_may_be_named_by_its_file():
    assert read("python verl/trainer/main_ppo_format.py a.b=1").program == "main_ppo_format"


def test_settings_below_a_comment_are_not_passed_on_and_that_is_said():
    found = read(f"{COMMAND} a.b=1 \\\n  # more\n  c.d=2 \\\n  e.f=3")
    assert [word for word, _ in found.words] == ["a.b=1"]
    assert found.left_behind == ("line 3: c.d=2",)


def test_several_commands_are_refused_with_their_lines():
    line = refused(f"{COMMAND} a.b=1\n\n{COMMAND} a.b=2")
    assert "expected one training command, found 2 (lines 1, 3)" in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "run.sh:1: expected a command as python3 -m verl.trainer.main_ppo"),
        ("python -m verl.trainer.fsdp_sft_trainer a.b=1", "found verl.trainer.fsdp_sft_trainer"),
        ("# nothing\n", "run.sh: expected a command"),
        ("A=1\n", "run.sh: expected a command"),
        (f"{COMMAND} a.b='x\n\n", "run.sh:1: the quote ' opened here is never closed"),
        (f'\n{COMMAND} a.b="x\n\n', 'run.sh:2: the quote " opened here is never closed'),
        (f"{COMMAND} a.b=${{x", "run.sh:1: the bracket ${ opened here is never closed"),
        ("A=(x y\n", "run.sh:1: the bracket ( opened here is never closed"),
    ],
)
def test_text_that_is_no_training_script_is_refused_with_its_line(text, message):
    assert message in refused(text)


def test_lines_of_settings_need_no_command():
    found = read("# mine\nWHERE=data\n+a.b=$WHERE/x \\\n c.d=[1,2]\nmax_turns=3\n")
    assert [word for word, _ in found.words] == ["+a.b=data/x", "c.d=[1,2]", "max_turns=3"]


def test_word_that_is_no_setting_is_refused_with_its_line(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"{COMMAND} \\\n  a.b=1 \\\n  oops\n")
    with pytest.raises(UserError, match=r"run.sh:3: expected KEY=VALUE, found 'oops'"):
        import_file(file)


def test_configuration_behind_the_command_is_said_to_be_unread(tmp_path):
    text = f"{COMMAND} --config-path=conf --config-name my_base algorithm.adv_estimator=grpo"
    _, made = imported(tmp_path, text)
    said(made, "is not read (--config-path=conf --config-name my_base)")


BAD_FILES = {
    "missing.sh": (None, "missing.sh: "),
    "empty.sh": (b" \n", "is empty; expected verl's configuration"),
    "binary.sh": (b"\x7fELF\xff\xfe\x00", "expected text in UTF-8"),
    "zeros.sh": (b"a.b=1\x00", "found bytes of 0"),
    "huge.sh": (b"# x\n" * 2**19, "has 2,097,152 bytes; expected a configuration or a script of at most"),
    "growing.sh": (("A=a\n" + "A=$A$A\n" * 40 + f"{COMMAND} a.b=$A").encode(), "expand to more than 2,097"),
    "nested.sh": (f"{COMMAND} a.b={'${A:-' * 20000}{'}' * 20000}".encode(), "nested too deeply"),
    "list.yaml": (b"- 1\n- 2\n", "or a list of overrides"),
    "text.yaml": (b"hello\n", "expected sections with keys under them, found str"),
    "nothing.yaml": (b"defaults: []\n", "expected settings such as"),
    "broken.yaml": (b"a: [1\n", "not YAML"),
    "twice.yaml": (b"data: {a: 1}\ndata: {b: 1}\n", "first in line 1"),
    "laughs.yaml": (
        b"a0: &a0 {x: 1, y: 2}\n" + b"".join(
            f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n".encode() for n in range(1, 40)
        ),
        "laughs.yaml: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_in_one_line(tmp_path, name):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        import_file(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="Is a directory"):
        import_file(tmp_path)


def test_line_ends_of_windows_make_no_difference(tmp_path):
    text = search_r1(*GRPO)
    one, _ = imported(tmp_path, text)
    (tmp_path / "other.sh").write_bytes(text.replace("\n", "\r\n").encode())
    assert (
        import_file(tmp_path / "other.sh").text.partition("\n")[2]
        == ((tmp_path / "imported.yaml").read_text().partition("\n")[2])
    )
    assert one.algorithm.name == "grpo"


def test_home_directory_is_that_of_this_machine(tmp_path):
    config, _ = imported(tmp_path, f"{COMMAND} data.train_files=$HOME/a.parquet data.val_files=~/b.parquet")
    assert config.data.train_files == (f"{Path.home()}/a.parquet",)
    assert config.data.val_files == (f"{Path.home()}/b.parquet",)


def test_variable_of_the_environment_in_yaml_is_given(tmp_path):
    text = "data: {train_files: '${oc.env:WHERE}/a.parquet'}\n"
    config, _ = imported(tmp_path, text, "verl.yaml", WHERE="my/data")
    assert config.data.train_files == ("my/data/a.parquet",)
    with pytest.raises(UserError, match=r"--define OTHER: .*verl.yaml has no \$\{oc.env:OTHER\}"):
        import_file(tmp_path / "verl.yaml", {"OTHER": "x"})
    _, made = imported(tmp_path, text, "verl.yaml")
    said(made, "${oc.env:WHERE} is not defined: data.train_files")
