// Tabs, panels, theme, scrolling, sizes of text fields, keys.

import { $, icon, remember } from "./dom.js";

const tabs = [...document.querySelectorAll('[role="tab"]')];
let onChoose = () => {};

/** The id of the tab that is shown. */
export const chosen = () => tabs.find((tab) => tab.getAttribute("aria-selected") === "true").id;

/** Shows a tab. */
export function choose(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  $("chat-form").hidden = tab.id !== "tab-chat";
  $("write-form").hidden = tab.id !== "tab-write";
  $("dock").classList.toggle("bare", tab.id === "tab-verify");
  onChoose();
}

/** Connects tabs, the list of conversations, the settings and the theme. */
export function connectPanels(chose) {
  onChoose = chose;
  for (const [i, tab] of tabs.entries()) {
    tab.onclick = () => choose(tab);
    tab.onkeydown = ({ key }) => {
      const to = { ArrowRight: tabs[(i + 1) % tabs.length], ArrowLeft: tabs.at(i - 1) }[key];
      if (!to) return;
      choose(to);
      to.focus();
    };
  }
  const drawer = (isOpen) => {
    document.body.classList.toggle("drawer", isOpen);
    $("sidebar-button").setAttribute("aria-expanded", String(isOpen));
    (isOpen ? $("sidebar-close") : $("sidebar-button")).focus();
  };
  const settings = (isOpen) => {
    $("options").hidden = !isOpen;
    $("options-button").setAttribute("aria-expanded", String(isOpen));
    (isOpen ? $("options-close") : $("options-button")).focus();
  };
  $("sidebar-button").onclick = () => drawer(true);
  $("sidebar-close").onclick = () => drawer(false);
  $("options-button").onclick = () => settings($("options").hidden);
  $("options-close").onclick = () => settings(false);
  $("shade").onclick = () => (document.body.classList.contains("drawer") ? drawer(false) : settings(false));
  // a choice in the list closes it on small screens
  $("sidebar").addEventListener("click", ({ target }) => {
    if (target.closest(".open, #clear") && document.body.classList.contains("drawer")) drawer(false);
  });
  addEventListener("keydown", ({ key }) => {
    if (key !== "Escape") return;
    if (document.body.classList.contains("drawer")) drawer(false);
    else if (!$("options").hidden && $("options").contains(document.activeElement)) settings(false);
  });
  $("keys-button").onclick = () => $("keys-dialog").showModal();
  connectTheme();
}

const THEMES = ["auto", "light", "dark"];

function connectTheme() {
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme-button").replaceChildren(icon(theme));
    const name = theme === "auto" ? "that of the system" : theme;
    $("theme-button").setAttribute("aria-label", `Theme: ${name}`);
    $("theme-button").title = `Theme: ${name}`;
  };
  let theme = document.documentElement.dataset.theme ?? "auto";
  show(theme);
  $("theme-button").onclick = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    show(theme);
    remember("starling-theme", theme === "auto" ? undefined : theme);
  };
}

/** Milliseconds after a movement of the user in which scrolling is theirs, not a consequence of changes of the text. */
const SCROLL_MS = 1000;
const SCROLL_KEYS = new Set(["ArrowUp", "ArrowDown", "PageUp", "PageDown", "Home", "End", " "]);

/** Keeps the end of the text in view while it grows, unless the user has scrolled up. */
export function connectScrolling() {
  const scroller = $("scroller");
  let isAtEnd = true;
  let movedAt = -SCROLL_MS;
  const moved = () => (movedAt = performance.now());
  const toEnd = () => {
    isAtEnd = true;
    scroller.scrollTop = scroller.scrollHeight;
  };
  for (const type of ["wheel", "touchmove"]) scroller.addEventListener(type, moved, { passive: true });
  scroller.addEventListener("keydown", ({ key }) => SCROLL_KEYS.has(key) && moved());
  // the scroll bar
  scroller.addEventListener("pointerdown", ({ target }) => target === scroller && moved());
  scroller.addEventListener(
    "scroll",
    () => {
      const isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
      $("latest").hidden = isNear;
      if (isNear) isAtEnd = true;
      else if (performance.now() - movedAt < SCROLL_MS) isAtEnd = false;
    },
    { passive: true },
  );
  const observer = new ResizeObserver(() => isAtEnd && chosen() !== "tab-verify" && toEnd());
  observer.observe(scroller);
  observer.observe(scroller.firstElementChild);
  $("latest").onclick = toEnd;
  return { toEnd };
}

/** Connects the keys of the page. */
export function connectKeys({ stop, isGenerating, begin, again, editLast }) {
  for (const [area, send] of [
    ["message", "send"],
    ["prompt", "write"],
  ]) {
    const field = $(area);
    field.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && area === "message" && field.value === "") {
        event.preventDefault();
        editLast();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!$(send).disabled) field.form.requestSubmit();
    });
    // as high as its text
    const fit = () => {
      field.style.height = "auto";
      field.style.height = `${field.scrollHeight + 2}px`;
    };
    field.addEventListener("input", fit);
  }
  addEventListener("keydown", (event) => {
    const { key, altKey, target } = event;
    const isField = /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
    if (key === "Escape" && isGenerating()) stop();
    else if (key === "/" && !isField) $("chat-form").hidden ? $("prompt").focus() : $("message").focus();
    else if (altKey && event.code === "KeyN") begin();
    else if (altKey && event.code === "KeyR") again();
    else return;
    event.preventDefault();
  });
}
