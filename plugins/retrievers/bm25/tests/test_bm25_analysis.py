"""From text to terms, in English, in other languages, and where no spaces are written."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl_bm25.analysis import words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The U.S. won 3-2", "the u s won 3 2"),
        ("Curie’s and the fox's", "curie and the fox"),
        ("don't say 'don’t' or o'Brien's rock'n'roll", "don't say don't or o'brien rock'n'roll"),
        ("1,000 m, 802.11a; 3.14. v2.0 2,", "1,000 m 802.11a 3.14 v2.0 2"),
        ("naïve café CRÈME", "naive cafe creme"),
        ("Straße ﬁne Ⅳ ①", "strasse fine iv 1"),
        ("Coca-Cola™ Windows™ Inc℠ №5", "coca cola windows inc 5"),
        ("H₂O x² ℌ K", "h2o x2 h k"),
        ("❤️ 👩‍🚀 ?!…", ""),
        ("", ""),
        ("Beyoncé’s Straße, the fox's O'Brien 42nd", "beyonce strasse the fox o'brien 42nd"),
    ],
)
def test_words_of_latin_script(text, found):
    assert words(text) == found.split()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("北京大学在哪里", "北京 京大 大学 学在 在哪 哪里"),
        ("东京2020年", "东京 2020 年"),
        ("タワーが", "タワ ワー ーが"),
        ("ｶﾞﾗｽ", "ガラ ラス"),
        ("서울의 봄", "서울 울의 봄"),
        ("iPhone手机", "iphone 手机"),
        ("中", "中"),
        ("𠮷野家", "𠮷野 野家"),
    ],
)
def test_characters_without_spaces_become_pairs(text, found):
    assert words(text) == words(text, accents=True) == found.split()


@given(st.text("éÉüßøÅЁйğİがパ한글देवनागरीகொάΆ x'", max_size=40))
def test_words_are_the_same_however_a_text_is_composed(text):
    assert words(unicodedata.normalize("NFD", text)) == words(unicodedata.normalize("NFC", text))
