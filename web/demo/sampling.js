// Sampling controls.

import { $, element } from "./dom.js";

const controls = [
  ["maxTokens", "Max tokens", 200, 1, 1],
  ["seed", "Seed (empty: random)", "", 0, 1],
  ["temperature", "Temperature", 0.8, 0, 0.05],
  ["topK", "Top-k (0: off)", 40, 0, 1],
  ["topP", "Top-p", 0.95, 0, 0.01],
  ["minP", "Min-p", 0.05, 0, 0.01],
  ["typicalP", "Typical-p", 1, 0, 0.01],
  ["repeatPenalty", "Repeat penalty", 1, 0, 0.05],
  ["repeatLastN", "Penalty window in tokens (-1: all)", 64, -1, 1],
  ["frequencyPenalty", "Frequency penalty", 0, -2, 0.1],
  ["presencePenalty", "Presence penalty", 0, -2, 0.1],
];

for (const [name, label, value, min, step] of controls) {
  const input = element("input", {
    // text: a 64-bit seed does not fit a number
    type: name === "seed" ? "text" : "number",
    inputMode: name === "seed" ? "numeric" : "",
    id: `option-${name}`,
    value: String(value),
    min: String(min),
    step: String(step),
    required: name !== "seed",
  });
  $("sampling").append(element("label", {}, label, input));
}
const stop = element("input", { type: "text", id: "option-stop" });
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
const form = element("input", { type: "text", id: "option-form-text", spellcheck: false });
const formLabel = element("label", { hidden: true }, "Schema or expression", form);
const examples = {
  json: '{"type": "object", "properties": {"age": {"type": "integer", "maximum": 20}}, "required": ["age"]}',
  regex: "[A-Z][a-z]+( [a-z]+){2,8}\\.",
};
kind.onchange = () => {
  formLabel.hidden = kind.value === "";
  form.value = examples[kind.value] ?? "";
};
$("sampling").append(element("label", {}, "Output format (without receipt)", kind), formLabel);

/** The structure option, if an output format is chosen. */
function structure() {
  if (kind.value === "") return {};
  return { structure: kind.value === "json" ? { json: JSON.parse(form.value) } : { regex: form.value } };
}

/** The values of the controls as options of `generate`. */
export function samplingOptions() {
  const options = Object.fromEntries(controls.map(([name]) => [name, Number($(`option-${name}`).value)]));
  const seed = $("option-seed").value.trim();
  if (seed === "") delete options.seed;
  if (/^\d+$/.test(seed) && !Number.isSafeInteger(options.seed)) options.seed = BigInt(seed);
  return { ...options, ...(stop.value !== "" && { stop: stop.value }), ...structure() };
}
