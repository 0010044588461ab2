//! Writes a story with the module with plain exports, in wasmtime: `cargo run --example story -- MODULE MODEL`.
//! `host-wasm/README.md` documents the calls.

use std::error::Error;
use std::io::Write;
use std::{env, fs};

use serde_json::{Value, json};
use wasmtime::{Config, Engine, Instance, Memory, Module, Store, StoreLimits, StoreLimitsBuilder, WasmParams, WasmResults};

const MEMORY_LIMIT: usize = 256 << 20;
const PIECE: usize = 1 << 20;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Starling {
    store: Store<StoreLimits>,
    instance: Instance,
    memory: Memory,
}

impl Starling {
    fn load(path: &str) -> Result<Starling> {
        let engine = Engine::new(Config::new().wasm_relaxed_simd(true))?;
        let mut store = Store::new(&engine, StoreLimitsBuilder::new().memory_size(MEMORY_LIMIT).build());
        store.limiter(|limits| limits);
        let instance = Instance::new(&mut store, &Module::from_file(&engine, path)?, &[])?;
        let memory = instance.get_memory(&mut store, "memory").ok_or("the module exports no memory")?;
        Ok(Starling { store, instance, memory })
    }

    fn raw<P: WasmParams, R: WasmResults>(&mut self, name: &str, arguments: P) -> Result<R> {
        Ok(self.instance.get_typed_func::<P, R>(&mut self.store, name)?.call(&mut self.store, arguments)?)
    }

    fn buffer(&mut self, bytes: &[u8]) -> Result<u32> {
        let pointer: u32 = self.raw("starling_alloc", bytes.len() as u32)?;
        if pointer == 0 {
            return Err(format!("no memory for {} bytes", bytes.len()).into());
        }
        self.memory.write(&mut self.store, pointer as usize, bytes)?;
        Ok(pointer)
    }

    fn call<P: WasmParams>(&mut self, name: &str, arguments: P) -> Result<Value> {
        let packed: u64 = self.raw(name, arguments)?;
        let (pointer, len) = ((packed >> 32) as u32, packed as u32);
        let mut text = vec![0; len as usize];
        self.memory.read(&self.store, pointer as usize, &mut text)?;
        self.raw::<_, ()>("starling_free", pointer)?;
        let mut reply: Value = serde_json::from_slice(&text)?;
        match reply.get("error") {
            Some(error) => Err(format!("{}: {}", error["kind"], error["message"]).into()),
            None => Ok(reply["ok"].take()),
        }
    }

    fn call_with(&mut self, name: &str, handle: u32, bytes: &[u8]) -> Result<Value> {
        let buffer = self.buffer(bytes)?;
        self.call(name, (handle, buffer))
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [module, model] = &arguments[..] else { return Err("usage: story MODULE MODEL".into()) };
    let mut starling = Starling::load(module)?;
    let model = fs::read(model)?;
    let loader: u32 = starling.raw("starling_loader", (model.len() as u64, 0_u32))?;
    for piece in model.chunks(PIECE) {
        starling.call_with("starling_feed", loader, piece)?;
    }
    let session = starling.call_with("starling_open", loader, b"")?.as_u64().ok_or("no session")? as u32;
    let request = json!({ "prompt": "Once upon a time", "max_tokens": 64, "sampling": { "temperature": 0 } });
    starling.call_with("starling_submit", session, request.to_string().as_bytes())?;
    loop {
        let step = starling.call("starling_step", session)?;
        for event in step["events"].as_array().into_iter().flatten() {
            print!("{}", event["text"].as_str().unwrap_or_default());
            std::io::stdout().flush()?;
            if event["type"] == "done" {
                println!();
                return Ok(());
            }
        }
    }
}
