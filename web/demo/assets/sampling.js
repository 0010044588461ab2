// The settings: instructions, sampling, output format, tools.

import { $, element } from "./dom.js";
import { NAMES } from "./wire.js";

/** Option, label, default (empty: none), minimum, step, and what an empty field means. */
const controls = [
  ["maxTokens", "Max tokens", "", 1, 1, "until it ends"],
  ["seed", "Seed", "", 0, 1, "random"],
  ["temperature", "Temperature", 0.8, 0, 0.05],
  ["topK", "Top-k (0: off)", 40, 0, 1],
  ["topP", "Top-p", 0.95, 0, 0.01],
  ["minP", "Min-p", 0.05, 0, 0.01],
  ["typicalP", "Typical-p", 1, 0, 0.01],
  ["repeatPenalty", "Repeat penalty", 1, 0, 0.05],
  ["repeatLastN", "Penalty window", 64, -1, 1],
  ["frequencyPenalty", "Frequency penalty", 0, -2, 0.1],
  ["presencePenalty", "Presence penalty", 0, -2, 0.1],
];

for (const [name, label, value, min, step, empty] of controls) {
  const input = element("input", {
    // text: a 64-bit seed does not fit a number
    type: name === "seed" ? "text" : "number",
    inputMode: name === "seed" ? "numeric" : "decimal",
    id: `option-${name}`,
    value: String(value),
    min: String(min),
    step: String(step),
    required: value !== "",
    placeholder: empty ?? "",
  });
  $("sampling").append(element("label", {}, label, input));
}
const stop = element("input", { type: "text", id: "option-stop", placeholder: "none" });
$("sampling").append(element("label", {}, "Stop text", stop));

const kinds = [
  ["", "Text"],
  ["json", "JSON schema"],
  ["regex", "Regular expression"],
];
const kind = element(
  "select",
  { id: "option-form" },
  ...kinds.map(([value, label]) => element("option", { value }, label)),
);
const form = element("textarea", { id: "option-form-text", spellcheck: false, rows: 3 });
const formLabel = element("label", { hidden: true, className: "whole" }, "Schema or expression; without receipt", form);
const examples = {
  json: '{"type": "object", "properties": {"age": {"type": "integer", "maximum": 20}}, "required": ["age"]}',
  regex: "[A-Z][a-z]+( [a-z]+){2,8}\\.",
};
kind.onchange = () => {
  formLabel.hidden = kind.value === "";
  form.value = examples[kind.value] ?? "";
};
$("sampling").append(element("label", {}, "Output format", kind), formLabel);

/** Options that a server tells of a model. */
const TOLD = ["temperature", "topK", "topP", "minP", "repeatPenalty"];
/** Fields that the user has changed keep their values when the model changes. */
const changed = new Set();
$("sampling").addEventListener("input", ({ target }) => changed.add(target.id));
let told = {};

/** Sets the fields to what suits a model. */
export function suit(sampling = {}) {
  told = sampling;
  for (const [name, , value] of controls) {
    const input = $(`option-${name}`);
    if (!changed.has(input.id) && TOLD.includes(name)) input.value = String(trim(sampling[NAMES[name]] ?? value));
  }
}

/** A number of 32 bits without the digits that it does not have. */
const trim = (value) => Number(Number(value).toPrecision(6));

$("options-reset").onclick = () => {
  changed.clear();
  for (const [name, , value] of controls) $(`option-${name}`).value = String(value);
  for (const id of ["option-system", "option-tools", "option-stop"]) $(id).value = "";
  kind.value = "";
  kind.onchange();
  suit(told);
};

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (e) {
    throw new Error(`${what} in the settings: ${e.message}`);
  }
}

/** The structure option, if an output format is chosen. */
function structure() {
  if (kind.value === "") return {};
  return { structure: kind.value === "json" ? { json: parsed(form.value, "The schema") } : { regex: form.value } };
}

/** The settings as options of `generate`. */
export function samplingOptions() {
  const given = controls.filter(([name]) => $(`option-${name}`).value.trim() !== "");
  const options = Object.fromEntries(given.map(([name]) => [name, Number($(`option-${name}`).value)]));
  const seed = $("option-seed").value.trim();
  if (/^\d+$/.test(seed) && !Number.isSafeInteger(options.seed)) options.seed = BigInt(seed);
  return { ...options, ...(stop.value !== "" && { stop: stop.value }), ...structure() };
}

/** Instructions for the model, and the tools that it may call. */
export function chatOptions() {
  const tools = $("option-tools").value.trim();
  const list = tools === "" ? undefined : parsed(tools, "The tools");
  if (list !== undefined && !Array.isArray(list)) throw new Error("The tools in the settings are not a list");
  return { system: $("option-system").value.trim(), ...(list?.length > 0 && { tools: list }) };
}
