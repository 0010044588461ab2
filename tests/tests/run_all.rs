//! Not a test: makes the last lines of `cargo test` say what only `tests/run-all.sh` covers.

fn main() {
    println!(
        "\n`cargo test` covers the engine, the command and the server on this machine. Only tests/run-all.sh also covers:\n\
         - AArch64 under emulation, and WebAssembly in wasmtime, Node and Chromium: kernels and pinned goldens\n\
         - the npm package, the demo page, edge runtimes, the WebAssembly component\n\
         - clients: openai (Python, Node), langchain, litellm, curl, promtool, schemathesis; routers in front of two servers\n\
         - format, lints, documentation, builds without std, the commands of the documents\n"
    );
}
