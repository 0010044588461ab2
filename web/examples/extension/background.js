// The service worker of the extension: answers `chrome.runtime.sendMessage({ prompt, options })` of its other parts, which
// content scripts too can send, with `{ text }` or `{ error }`. It has no workers of its own, so the engine runs inline.

import { Starling } from "./starling-web/dist/index.js";

let loading;
/** The model, loaded when it is first asked for, and again after the browser has ended this worker for its idleness. */
const model = () =>
  (loading ??= Starling.load(chrome.runtime.getURL("model.gguf"), { cache: "none" }).catch((e) => {
    loading = undefined;
    throw e;
  }));

chrome.runtime.onMessage.addListener(({ prompt, options }, _sender, respond) => {
  model()
    .then((model) => model.generate(prompt, options).result)
    .then(
      ({ text }) => respond({ text }),
      (e) => respond({ error: `${e.code ?? e.name}: ${e.message}` }),
    );
  return true; // the answer comes later
});
