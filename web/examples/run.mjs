// Writes a story in node, Deno or Bun: `node run.mjs`, `deno run --allow-read run.mjs`, `bun run.mjs`.
// In a project of your own: import { Starling } from "starling-web".

import { Starling } from "../dist/index.js";

const model = await Starling.load(new URL("../../fixtures/starling-tiny/starling-tiny-q8_0.gguf", import.meta.url));
const story = model.generate("Once upon a time", { maxTokens: 64, temperature: 0 });
let text = "";
for await (const piece of story) text += piece;
console.log(JSON.stringify({ text, isa: model.info.isa }));
model.dispose();
