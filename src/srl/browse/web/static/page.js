// Theme, keys, copying, and asking for a live page again. Pages work without it.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const themes = ["auto", "light", "dark"];
const every = 3000;

function chosenTheme() {
  const kept = localStorage.getItem("theme");
  return themes.includes(kept) ? kept : "auto";
}

function applyTheme() {
  const chosen = chosenTheme();
  document.documentElement.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
  const button = document.getElementById("theme");
  if (button) button.textContent = `theme: ${chosen}`;
}

function nextTheme() {
  localStorage.setItem("theme", themes[(themes.indexOf(chosenTheme()) + 1) % themes.length]);
  applyTheme();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  if (!dialog.open) dialog.showModal();
}

function follow(rel) {
  const link = document.querySelector(`a[rel="${rel}"]`);
  if (link) link.click();
}

function focusFilter() {
  const field = document.getElementById("filter");
  if (field) { field.focus(); if (field.select) field.select(); }
}

const keys = {
  n: () => follow("next"), p: () => follow("prev"), u: () => follow("up"), "/": focusFilter, "?": showKeys,
};

function onKey(event) {
  const typing = event.target.closest("input, textarea, select, dialog[open]");
  if (event.key === "Escape" && typing && typing.blur) typing.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
}

async function copy(button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  } catch {
    button.textContent = "the browser does not allow copying";
  }
  setTimeout(() => { button.textContent = said; }, 1500);
}

let tag = null;

function replaceParts(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const problem = document.getElementById("part-problem");
  if (problem && !fresh.getElementById("part-problem")) {  // what was missing is there now: another page
    location.reload();
    return;
  }
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = fresh.getElementById(part.id);
    if (other && !part.contains(document.activeElement) && part.innerHTML !== other.innerHTML) {
      part.replaceWith(document.adoptNode(other));
    }
  }
}

async function refresh() {
  const said = document.getElementById("live");
  try {
    if (!document.hidden) {
      const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status !== 304) replaceParts(await answer.text());
      tag = answer.headers.get("ETag");
      said.textContent = answer.ok || answer.status === 304 ? "live" : "the log cannot be read";
    }
  } catch {
    said.textContent = "srl inspect web has ended";
  }
  setTimeout(refresh, every);
}

applyTheme();
dark.addEventListener("change", applyTheme);
document.addEventListener("DOMContentLoaded", () => {
  applyTheme();
  document.addEventListener("keydown", onKey);
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button);
  });
  if ("live" in document.body.dataset) setTimeout(refresh, every);
});
