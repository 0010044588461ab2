// Turns the JavaScript that `wasm-pack build --target web` writes, which has one instance of its module for a whole page, into
// a function that makes an instance at each call: a model in a page must outlive a trap of another.
//
//     node bindings.mjs FOLDER NAME OUT    reads FOLDER/NAME.js and .d.ts, writes OUT.js, OUT.d.ts and OUT-bindings.d.ts

import { readFile, writeFile } from "node:fs/promises";
import { basename } from "node:path";

const [folder, name, out] = process.argv.slice(2);

const names = [];
const body = (await readFile(`${folder}/${name}.js`, "utf8"))
  .replace(/^\/\* @ts-self-types=.*\n/, "")
  .replace(/^export (async function|function|class) (\w+)/gm, (_, kind, exported) => {
    names.push(exported);
    return `${kind} ${exported}`;
  })
  .replace(/^export \{ (.*?) \};?$/gm, (_, list) => {
    for (const item of list.split(", ")) if (!item.includes(" as default")) names.push(item);
    return "";
  });
// after a trap nothing of an instance may run: its stack and its heap are in an unknown state. Not the finalisers of its objects
let finalisers = 0;
const finalised = body.replace(
  /new FinalizationRegistry\((ptr|state) => (wasm\.\w+\((?:ptr, 1|state\.a, state\.b)\))\)/g,
  (_, argument, free) => {
    finalisers++;
    return `new FinalizationRegistry(${argument} => { if (!isAbandoned) ${free}; })`;
  },
);
if (finalisers !== body.split("new FinalizationRegistry").length - 1)
  throw new Error(`${folder}/${name}.js: finalisers of an unknown form`);
// and not its futures, which the event loop calls: a trap of theirs has no caller that sees it
let closures = 0;
const guarded = finalised
  .replace(/return (f\((?:a|state\.a), state\.b, \.\.\.args\));/g, (_, call) => {
    closures++;
    return `return fromEventLoop(() => ${call});`;
  })
  .replaceAll("if (--state.cnt === 0) {", "if (--state.cnt === 0 && !isAbandoned) {");
if (closures !== body.split(/function make(?:Mut)?Closure\(/).length - 1)
  throw new Error(`${folder}/${name}.js: closures of an unknown form`);
if (!names.includes("initSync")) throw new Error(`${folder}/${name}.js: no export initSync`);
// what the patterns above do not know would be a syntax error in a function, or shared by all instances
const unknown = /^(export|import)\b.*$/m.exec(body);
if (unknown) throw new Error(`${folder}/${name}.js: cannot be put into a function: ${unknown[0]}`);

const trap = `let isAbandoned = false;
let reportTrap = () => {};
function abandon() { isAbandoned = true; }
function onTrap(report) { reportTrap = report; }
function fromEventLoop(call) {
  if (isAbandoned) return undefined;
  try {
    return call();
  } catch (e) {
    abandon();
    reportTrap(e);
  }
}`;
const exported = [...names, "abandon", "onTrap"].join(", ");
await writeFile(`${out}.js`, `export function instantiate() {\n${trap}\n${guarded}\nreturn { ${exported} };\n}\n`);
const types = await readFile(`${folder}/${name}.d.ts`, "utf8");
const added = `/** Stops the finalisers and the futures of an instance that has trapped. */
export function abandon(): void;
/** Says who is told of a trap in a future; it is called once. */
export function onTrap(report: (trap: Error) => void): void;`;
await writeFile(`${out}-bindings.d.ts`, `${types}\n${added}\n`);
await writeFile(
  `${out}.d.ts`,
  `import type * as bindings from "./${basename(out)}-bindings.js";
export type * from "./${basename(out)}-bindings.js";
/** The classes and functions of a new instance of the module, which \`initSync\` creates. */
export function instantiate(): typeof bindings;
`,
);
