using Workerd = import "/workerd/workerd.capnp";

const config :Workerd.Config = (
  services = [(name = "main", worker = .worker)],
  sockets = [(name = "http", address = "127.0.0.1:8787", http = (), service = "main")],
);

# the bundler of a project would list these
const worker :Workerd.Worker = (
  compatibilityDate = "2026-01-01",
  # the signal of a request says when its client has left
  compatibilityFlags = ["enable_request_signal"],
  modules = [
    (name = "main", esModule = embed "workerd.mjs"),
    (name = "starling.wasm", wasm = embed "../wasm/simd128.wasm"),
    (name = "grammar.wasm", wasm = embed "../wasm/grammar.wasm"),
    (name = "model.gguf", data = embed "../../fixtures/starling-tiny/starling-tiny-q8_0.gguf"),
    (name = "starling-web", esModule = "export * from \"dist/index.js\";"),
    (name = "dist/index.js", esModule = embed "../dist/index.js"),
    (name = "dist/backend.js", esModule = embed "../dist/backend.js"),
    (name = "dist/cache.js", esModule = embed "../dist/cache.js"),
    (name = "dist/capacity.js", esModule = embed "../dist/capacity.js"),
    (name = "dist/core.js", esModule = embed "../dist/core.js"),
    (name = "dist/errors.js", esModule = embed "../dist/errors.js"),
    (name = "dist/features.js", esModule = embed "../dist/features.js"),
    (name = "dist/generation.js", esModule = embed "../dist/generation.js"),
    (name = "dist/grammar.js", esModule = embed "../dist/grammar.js"),
    (name = "dist/hex.js", esModule = embed "../dist/hex.js"),
    (name = "dist/instance.js", esModule = embed "../dist/instance.js"),
    (name = "dist/kv-store.js", esModule = embed "../dist/kv-store.js"),
    (name = "dist/load.js", esModule = embed "../dist/load.js"),
    (name = "dist/messages.js", esModule = embed "../dist/messages.js"),
    (name = "dist/module.js", esModule = embed "../dist/module.js"),
    (name = "dist/openai.js", esModule = embed "../dist/openai.js"),
    (name = "dist/options.js", esModule = embed "../dist/options.js"),
    (name = "dist/protocol.js", esModule = embed "../dist/protocol.js"),
    (name = "dist/request.js", esModule = embed "../dist/request.js"),
    (name = "dist/resource.js", esModule = embed "../dist/resource.js"),
    (name = "dist/responses.js", esModule = embed "../dist/responses.js"),
    (name = "dist/runtime.js", esModule = embed "../dist/runtime.js"),
    (name = "dist/script.js", esModule = embed "../dist/script.js"),
    (name = "dist/signal.js", esModule = embed "../dist/signal.js"),
    (name = "dist/source.js", esModule = embed "../dist/source.js"),
    (name = "dist/structure.js", esModule = embed "../dist/structure.js"),
    (name = "dist/threads.js", esModule = embed "../dist/threads.js"),
    (name = "wasm/grammar.js", esModule = embed "../wasm/grammar.js"),
    (name = "wasm/memory64-threads.js", esModule = embed "../wasm/memory64-threads.js"),
    (name = "wasm/memory64.js", esModule = embed "../wasm/memory64.js"),
    (name = "wasm/starling.js", esModule = embed "../wasm/starling.js"),
    (name = "wasm/threads.js", esModule = embed "../wasm/threads.js"),
  ],
);
