// The page's side: what is typed goes to the worker, what the worker says is shown.

const [form, prompt, go, stop, text, status] = ["form", "prompt", "go", "stop", "text", "status"].map((id) =>
  document.getElementById(id),
);
const query = new URLSearchParams(location.search);
const worker = new Worker("worker.js", { type: "module" });

const busy = (is) => {
  go.disabled = is;
  stop.disabled = !is;
};

worker.onmessage = ({ data }) => {
  switch (data.type) {
    case "progress":
      status.textContent = `Loading the model: ${Math.round((100 * data.done) / data.total)} %`;
      break;
    case "ready":
      status.textContent = `${data.info.name}, ${data.info.isa}`;
      busy(false);
      break;
    case "text":
      text.append(data.text);
      break;
    case "done":
      status.textContent = `${data.tokens} tokens, ${(data.tokens / data.seconds).toFixed(1)} a second`;
      busy(false);
      break;
    case "error":
      status.textContent = data.message;
      busy(false);
      break;
  }
};

form.onsubmit = (event) => {
  event.preventDefault();
  busy(true);
  text.textContent = prompt.value;
  worker.postMessage({ type: "generate", prompt: prompt.value });
};
stop.onclick = () => worker.postMessage({ type: "stop" });

worker.postMessage({
  type: "load",
  package: new URL(query.get("package") ?? "/target/wasm/web-simd128", location.href).href,
  model: new URL(query.get("model") ?? "/fixtures/starling-tiny/starling-tiny-q8_0.gguf", location.href).href,
});
