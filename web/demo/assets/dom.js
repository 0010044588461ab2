// DOM helpers and number formats.

export const $ = (id) => document.getElementById(id);

/** An element: `element("p", { className: "meta" }, "text", child)`. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** An icon of the page's symbols. */
export function icon(name) {
  const SVG = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon and a text; `isBare` shows the icon only. */
export function button(name, label, onclick, isBare = false) {
  const made = element("button", { type: "button", className: isBare ? "icon small" : "small", onclick }, icon(name));
  if (isBare) {
    made.setAttribute("aria-label", label);
    made.title = label;
  } else made.append(label);
  return made;
}

export const bytes = (n) =>
  n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`;

export const seconds = (s) => (s < 60 ? `${Math.ceil(s)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`);

/** A value that this browser keeps, `undefined` where there is no storage. */
export function recall(key, storage = "localStorage") {
  try {
    return globalThis[storage].getItem(key) ?? undefined;
  } catch {
    return undefined;
  }
}

/** Keeps a value, or removes it. */
export function remember(key, value, storage = "localStorage") {
  try {
    if (value === undefined) globalThis[storage].removeItem(key);
    else globalThis[storage].setItem(key, value);
  } catch {
    // no storage: it is asked for again
  }
}

/** Downloads a text as a file. */
export function save(name, text) {
  const link = element("a", {
    href: URL.createObjectURL(new Blob([text], { type: "application/json" })),
    download: name,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A button that copies a text. */
export function copyButton(text, label = "Copy") {
  const made = button("copy", label, async () => {
    let said = "Copied";
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      said = "Not allowed";
    }
    made.replaceChildren(icon(said === "Copied" ? "check" : "alert"), said);
    setTimeout(() => made.replaceChildren(icon("copy"), label), 1500);
  });
  return made;
}
