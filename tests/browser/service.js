// A service worker that writes: it has no workers of its own, so the engine runs inline.

import { Starling } from "../../web/dist/index.js";

addEventListener("message", (event) => {
  const { url, port } = event.data;
  const answer = async () => {
    const model = await Starling.load(url);
    const { text } = await model.generate("Once upon a time", { maxTokens: 20, seed: 0 }).result;
    model.dispose();
    return text;
  };
  event.waitUntil(
    answer().then(
      (text) => port.postMessage(text),
      (e) => port.postMessage(`${e.name}: ${e.message}`),
    ),
  );
});
