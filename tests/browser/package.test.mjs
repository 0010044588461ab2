// The tarball of `npm pack`, as users install it: in a fresh Node project, in Vite and webpack apps, and as plain files
// on a static server. After web/build.sh.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { cp, mkdir, mkdtemp, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

import { TINY, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));
const VITE = "8.3.8";
const REACT = ["react@19.3.1", "react-dom@19.3.1", "@types/react@19.3.3", "@types/react-dom@19.3.0"];
const SVELTE = ["svelte@5.57.3", "@sveltejs/vite-plugin-svelte@7.3.1"];
const VUE = ["vue@3.5.45", "@vitejs/plugin-vue@6.0.11"];
/** The last that bundles dependencies of its own accord in development. */
const VITE_7 = "7.3.8";
const WEBPACK = ["webpack@5.112.2", "webpack-cli@7.3.1"];
const TYPESCRIPT = "7.0.2";

let directory;
let tarball;
const sh = (cwd, command, ...args) =>
  execFileSync(command, args, { cwd, encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] });
const npm = (cwd, ...args) => sh(cwd, "npm", ...args, "--no-audit", "--no-fund", "--loglevel=error");

before(async () => {
  directory = await mkdtemp(join(tmpdir(), "starling-package-"));
  npm(join(root, "web"), "pack", "--ignore-scripts", "--pack-destination", directory);
  tarball = join(
    directory,
    (await readdir(directory)).find((name) => name.endsWith(".tgz")),
  );
});
after(() => rm(directory, { recursive: true }));

async function project(name, files, ...packages) {
  const at = join(directory, name);
  await mkdir(at, { recursive: true });
  for (const [path, text] of Object.entries({ "package.json": '{"type":"module","private":true}', ...files })) {
    await mkdir(join(at, path, ".."), { recursive: true });
    await writeFile(join(at, path), text);
  }
  npm(at, "install", tarball, ...packages);
  return at;
}

const story = 'generate("Once upon a time", { maxTokens: 8, temperature: 0 })';
let expected;

test("a fresh node project", async () => {
  const script = `import { Starling } from "starling-web";
    const model = await Starling.load(new URL(process.argv[2]));
    for await (const piece of model.${story}) process.stdout.write(piece);`;
  const at = await project("node", { "main.js": script });
  expected = sh(at, process.execPath, "main.js", new URL(`../..${TINY}`, import.meta.url).href);
  assert.ok(expected.length > 10);
  assert.deepEqual(
    (await readdir(join(at, "node_modules"))).filter((name) => !name.startsWith(".")),
    ["starling-web"],
    "dependencies",
  );
});

test("its types", async () => {
  const main = `import { Starling, StarlingError, type ChatCompletionRequest, type Completion, type Generation, type Structure } from "starling-web";
    const model: Starling = await Starling.load("x.gguf", { onProgress: ({ loaded, total }) => console.log(loaded / total), cache: "reuse" });
    for await (const piece of model.generate("a", { seed: 1n, topK: 3 })) piece.toUpperCase();
    const { text }: Completion = await model.chat([{ role: "user", content: "a" }]).result;
    const stream = await model.chat.completions.create({ messages: [], stream: true });
    for await (const chunk of stream) chunk.choices[0]?.delta.content?.length;
    const whole = await model.chat.completions.create({ messages: [] });
    whole.choices[0]?.message.content?.length;
    const request: ChatCompletionRequest = { messages: [], stream: Math.random() < 0.5, tool_choice: "required" };
    request.response_format = { type: "json_schema", json_schema: { name: "a", schema: { type: "object" } } };
    model.generate("a", { structure: { choice: ["b"] } satisfies Structure });
    const either = await model.chat.completions.create(request);
    if ("choices" in either) either.choices[0]?.message.content?.length;
    else for await (const chunk of either) chunk.choices[0]?.delta.content?.length;
    const generation: Generation = model.generate("a");
    // @ts-expect-error
    model.generate("a", { topk: 3 });
    // @ts-expect-error
    model.generate("a", { structure: { choice: "b" } });
    // @ts-expect-error
    model.crash();
    // @ts-expect-error
    generation.fail(1);
    // @ts-expect-error
    generation.receive({});
    export const code = (e: unknown) => (e instanceof StarlingError ? e.code satisfies string : text);`;
  const options = { module: "nodenext", target: "es2022", strict: true, noEmit: true, skipLibCheck: false, types: [] };
  const config = (more) => JSON.stringify({ compilerOptions: { ...options, ...more }, files: ["main.ts"] });
  const files = { "main.ts": main, "tsconfig.json": config({}), "least.json": config({ lib: ["es2022", "dom"] }) };
  const at = await project("types", files, `typescript@${TYPESCRIPT}`);
  sh(at, "npx", "tsc");
  sh(at, "npx", "tsc", "--project", "least.json");
});

const appScript = `import { Starling } from "starling-web";
  const model = await Starling.load("model.gguf", { threads: 2 });
  for await (const piece of model.${story}) document.getElementById("out").append(piece);
  const { worker, threads } = model.info;
  const { text } = await model.generate("A", { structure: { choice: ["fox"] } }).result;
  document.title = text === "fox" && worker && threads === (crossOriginIsolated ? 2 : 1) ? "done in a worker" : "done, but how";`;
/** What makes a page cross-origin isolated. */
const ISOLATED = { "cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp" };
const appPage = (script) =>
  `<!doctype html><html><head><link rel="icon" href="data:,"></head><body><p id="out"></p>${script}</body></html>`;

test("a fresh Vite app", async () => {
  const html = appPage('<script type="module" src="/main.js"></script>');
  const at = await project("vite", { "index.html": html, "main.js": appScript }, `vite@${VITE}`);
  await mkdir(join(at, "public"));
  await cp(root + TINY, join(at, "public/model.gguf"));
  sh(at, "npx", "vite", "build", "--logLevel", "warn");
  await check(join(at, "dist"), "/index.html");
  await check(join(at, "dist"), "/index.html", ISOLATED);
});

test("Vite's server for development, before version 8 with the package excluded", async () => {
  const files = {
    "index.html": appPage('<script type="module" src="/main.js"></script>'),
    "main.js": appScript,
    "vite.config.js": 'export default { optimizeDeps: { exclude: ["starling-web"] } };',
  };
  const old = await project("vite-7", files, `vite@${VITE_7}`);
  await mkdir(join(old, "public"));
  await cp(root + TINY, join(old, "public/model.gguf"));
  for (const at of [join(directory, "vite"), old]) {
    const { createServer } = await import(pathToFileURL(join(at, "node_modules/vite/dist/node/index.js")));
    const server = await createServer({
      root: at,
      logLevel: "error",
      server: { host: "127.0.0.1", headers: ISOLATED },
    });
    await server.listen();
    await look(`http://127.0.0.1:${server.httpServer.address().port}/`);
    await server.close();
  }
});

const example = (name) => readFile(join(root, "web/examples", name), "utf8");
/** Presses the button once it can be, and hands over what the component writes. */
const pressed = `const wait = async (done) => { while (!done()) await new Promise((resolve) => setTimeout(resolve, 20)); };
  const button = () => document.querySelector("button");
  await wait(() => button() && !button().disabled);
  button().click();
  await wait(() => document.querySelector("[role=status]").textContent === "length");
  document.getElementById("out").textContent = document.querySelector("output").textContent;
  document.title = "done in a worker";`;
const componentPage = (script) =>
  appPage(
    ["<div id=\"app\"></div>", ...[script, "press.js"].map((src) => `<script type="module" src="/${src}"></script>`)].join(""),
  );

test("a React component", async () => {
  const main = `import { createRoot } from "react-dom/client";
    import { Story } from "./react.tsx";
    createRoot(document.getElementById("app")!).render(<Story source="model.gguf" prompt="Once upon a time" />);`;
  const options = { module: "esnext", moduleResolution: "bundler", target: "es2022", lib: ["es2022", "dom"], types: [] };
  const more = { strict: true, noEmit: true, jsx: "react-jsx", allowImportingTsExtensions: true };
  const files = {
    "index.html": componentPage("main.tsx"),
    "main.tsx": main,
    "press.js": pressed,
    "react.tsx": await example("react.tsx"),
    "tsconfig.json": JSON.stringify({ compilerOptions: { ...options, ...more }, files: ["main.tsx"] }),
  };
  const at = await project("react", files, `vite@${VITE}`, `typescript@${TYPESCRIPT}`, ...REACT);
  await mkdir(join(at, "public"));
  await cp(root + TINY, join(at, "public/model.gguf"));
  sh(at, "npx", "tsc");
  sh(at, "npx", "vite", "build", "--logLevel", "warn");
  await check(join(at, "dist"), "/index.html");
});

test("a Svelte component", async () => {
  const main = `import { mount } from "svelte";
    import Story from "./Story.svelte";
    mount(Story, { target: document.getElementById("app"), props: { source: "model.gguf", prompt: "Once upon a time" } });`;
  const files = {
    "index.html": componentPage("main.js"),
    "main.js": main,
    "press.js": pressed,
    "Story.svelte": await example("Story.svelte"),
    "vite.config.js": `import { svelte } from "@sveltejs/vite-plugin-svelte"; export default { plugins: [svelte()] };`,
  };
  const at = await project("svelte", files, `vite@${VITE}`, ...SVELTE);
  await mkdir(join(at, "public"));
  await cp(root + TINY, join(at, "public/model.gguf"));
  sh(at, "npx", "vite", "build", "--logLevel", "warn");
  await check(join(at, "dist"), "/index.html");
});

test("a Vue component", async () => {
  const main = `import { createApp } from "vue";
    import Story from "./Story.vue";
    createApp(Story, { source: "model.gguf", prompt: "Once upon a time" }).mount("#app");`;
  const files = {
    "index.html": componentPage("main.js"),
    "main.js": main,
    "press.js": pressed,
    "Story.vue": await example("Story.vue"),
    "vite.config.js": `import vue from "@vitejs/plugin-vue"; export default { plugins: [vue()] };`,
  };
  const at = await project("vue", files, `vite@${VITE}`, ...VUE);
  await mkdir(join(at, "public"));
  await cp(root + TINY, join(at, "public/model.gguf"));
  sh(at, "npx", "vite", "build", "--logLevel", "warn");
  await check(join(at, "dist"), "/index.html");
});

test("a service worker that all tabs share", async () => {
  const at = join(directory, "service");
  await cp(join(directory, "node/node_modules/starling-web"), join(at, "starling-web"), { recursive: true });
  await cp(root + TINY, join(at, "model.gguf"));
  await writeFile(join(at, "service-worker.js"), await example("service-worker.js"));
  const script = `await navigator.serviceWorker.register("/service-worker.js", { type: "module" });
    while (!navigator.serviceWorker.controller) await new Promise((resolve) => setTimeout(resolve, 20));
    document.getElementById("out").textContent = await (await fetch("/story?prompt=Once+upon+a+time")).text();
    document.title = "done in a worker";`;
  await writeFile(join(at, "index.html"), appPage(`<script type="module">${script}</script>`));
  await check(at, "/index.html");
});

test("a fresh webpack app", async () => {
  const files = { "src/index.js": appScript, "dist/index.html": appPage('<script src="main.js"></script>') };
  const at = await project("webpack", files, ...WEBPACK);
  await cp(root + TINY, join(at, "dist/model.gguf"));
  sh(at, "npx", "webpack", "--mode", "production");
  await check(join(at, "dist"), "/index.html");
  await check(join(at, "dist"), "/index.html", ISOLATED);
});

test("bundlers keep the script of a worker that is imported for what it does", async () => {
  const script = 'import "starling-web/worker"; import "starling-web/thread";';
  const at = await project("bare", { "src/index.js": script, "main.js": script }, ...WEBPACK, `vite@${VITE}`);
  sh(at, "npx", "webpack", "--mode", "production");
  await writeFile(join(at, "index.html"), '<script type="module" src="/main.js"></script>');
  sh(at, "npx", "vite", "build", "--outDir", "vite", "--logLevel", "error");
  const assets = (await readdir(join(at, "vite/assets"))).filter((name) => /^index.*js$/.test(name));
  for (const name of ["dist/main.js", ...assets.map((name) => `vite/assets/${name}`)]) {
    const bundle = await readFile(join(at, name), "utf8");
    // what only the one and only the other posts
    for (const message of ["refused", "lost"]) assert.match(bundle, new RegExp(`type: ?["'\`]${message}["'\`]`), name);
  }
});

test("plain files on a static server, with and without the headers of an isolated page", async () => {
  const at = join(directory, "static");
  await cp(join(directory, "node/node_modules/starling-web"), join(at, "starling"), { recursive: true });
  await cp(root + TINY, join(at, "model.gguf"));
  const page = `<!doctype html><html><head><link rel="icon" href="data:,"></head><body><p id="out"></p><script type="module">
    ${appScript.replace("starling-web", "./starling/dist/index.js")}
  </script></body></html>`;
  await writeFile(join(at, "index.html"), page);
  await check(at, "/index.html");
  await check(at, "/index.html", ISOLATED);
});

test("from another origin, as from a CDN, with and without threads", async () => {
  const headers = { "access-control-allow-origin": "*", "cross-origin-resource-policy": "cross-origin" };
  const cdn = await serve(join(directory, "node/node_modules"), headers);
  const at = join(directory, "elsewhere");
  await mkdir(at);
  await cp(root + TINY, join(at, "model.gguf"));
  const script = appScript.replace("starling-web", `${cdn.origin}/starling-web/dist/index.js`);
  await writeFile(join(at, "index.html"), appPage(`<script type="module">${script}</script>`));
  await check(at, "/index.html");
  await check(at, "/index.html", ISOLATED);
  await cdn.close();
});

/** Opens a page of a directory and reads what it wrote. */
async function check(directory, path, headers) {
  const server = await serve(directory, headers);
  await look(server.origin + path).finally(server.close);
}

async function look(url) {
  const b = await open();
  try {
    const page = await b.browser.newPage();
    const errors = [];
    page.on("pageerror", (e) => errors.push(e.message));
    await page.goto(url);
    await page
      .waitForFunction(() => document.title.startsWith("done"), null, { timeout: 30_000 })
      .catch((e) => errors.push(e.message));
    assert.deepEqual(errors, []);
    assert.equal(await page.title(), "done in a worker");
    assert.equal(await page.textContent("#out"), expected);
  } finally {
    await b.close();
  }
}
