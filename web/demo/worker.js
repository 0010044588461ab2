// The engine's side: owns the module, feeds it the model as it downloads, and runs a step at a time so that messages
// get through between steps.

let model;
let stopped = false;

async function load(packageUrl, modelUrl) {
  const starling = await import(`${packageUrl}/starling_wasm.js`);
  await starling.default();
  const response = await fetch(modelUrl);
  if (!response.ok) throw new Error(`${modelUrl}: ${response.status} ${response.statusText}`);
  const total = Number(response.headers.get("content-length"));
  const loader = new starling.Loader(total);
  let done = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { value, done: end } = await reader.read();
    if (end) break;
    loader.feed(value);
    done += value.length;
    postMessage({ type: "progress", done, total });
  }
  model = loader.open("");
  postMessage({ type: "ready", info: JSON.parse(model.info()) });
}

async function generate(prompt) {
  const id = model.submit(JSON.stringify({ prompt }));
  const start = performance.now();
  let tokens = 0;
  stopped = false;
  for (let done = false; !done; ) {
    for (const event of JSON.parse(model.step()).events) {
      if (event.text) postMessage({ type: "text", text: event.text });
      if (event.type === "token") tokens += 1;
      done ||= event.type === "done";
    }
    // let a message in
    await new Promise((resolve) => setTimeout(resolve));
    if (stopped) done = true;
  }
  model.cancel(id);
  postMessage({ type: "done", tokens, seconds: (performance.now() - start) / 1000 });
}

onmessage = async ({ data }) => {
  try {
    if (data.type === "load") await load(data.package, data.model);
    if (data.type === "generate") await generate(data.prompt);
    if (data.type === "stop") stopped = true;
  } catch (e) {
    postMessage({ type: "error", message: e.message });
  }
};
