// A page of the extension: the engine has a worker, as on any other page.
//
// To try it, put beside these files `starling-web` (the package's folder in node_modules) and `model.gguf`, and load the
// folder in chrome://extensions in developer mode.

import { Starling } from "./starling-web/dist/index.js";

const [form, prompt, output, button] = ["form", "textarea", "output", "button"].map((name) => document.querySelector(name));
let model;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  button.disabled = true;
  try {
    model ??= await Starling.load(chrome.runtime.getURL("model.gguf"), { cache: "none" });
    output.value = prompt.value;
    for await (const piece of model.generate(prompt.value, { maxTokens: 64, temperature: 0 })) output.value += piece;
  } catch (e) {
    output.value = `${e.code ?? e.name}: ${e.message}`;
  } finally {
    button.disabled = false;
  }
});
