//! The shipped module with plain exports (`host-wasm/src/plain.rs`), in wasmtime.

use serde_json::Value;
use wasmtime::{
    Config, Engine, Instance, Memory, Module, Result, Store, StoreLimits, StoreLimitsBuilder, WasmParams, WasmResults,
};

/// An engine that knows all that Starling uses.
pub fn engine() -> Result<Engine> {
    Engine::new(Config::new().wasm_relaxed_simd(true))
}

/// The same, which can stop what takes too long: a module that is compiled for that is a little slower.
pub fn stopping_engine() -> Result<Engine> {
    Engine::new(Config::new().wasm_relaxed_simd(true).epoch_interruption(true))
}

/// What a call replies: the value of `ok`, or `kind` and `message` of `error`.
pub type Reply = std::result::Result<Value, (String, String)>;

/// An instance of the module.
pub struct Starling {
    store: Store<StoreLimits>,
    instance: Instance,
    memory: Memory,
}

impl Starling {
    /// Instantiates the module; it imports nothing.
    pub fn new(engine: &Engine, module: &Module) -> Result<Starling> {
        let mut store = Store::new(engine, StoreLimits::default());
        store.limiter(|limits| limits);
        // until `set_deadline` sets a nearer one
        store.set_epoch_deadline(u64::MAX / 2);
        let instance = Instance::new(&mut store, module, &[])?;
        let memory = instance.get_memory(&mut store, "memory").expect("the module exports its memory");
        Ok(Starling { store, instance, memory })
    }

    /// Bytes that its memory may have from now on.
    pub fn limit_memory(&mut self, bytes: usize) {
        *self.store.data_mut() = StoreLimitsBuilder::new().memory_size(bytes).build();
    }

    /// Stops its calls once the engine's epoch has advanced so often.
    pub fn set_deadline(&mut self, epochs: u64) {
        self.store.set_epoch_deadline(epochs);
    }

    /// Calls an export.
    ///
    /// # Errors
    /// If it is stopped.
    pub fn try_raw<P: WasmParams, R: WasmResults>(&mut self, name: &str, params: P) -> Result<R> {
        let f = self.instance.get_typed_func::<P, R>(&mut self.store, name)?;
        f.call(&mut self.store, params)
    }

    /// Calls an export.
    ///
    /// # Panics
    /// If it traps, which none may, or is not there.
    pub fn raw<P: WasmParams, R: WasmResults>(&mut self, name: &str, params: P) -> R {
        self.try_raw(name, params).unwrap_or_else(|e| panic!("{name} trapped: {e:?}"))
    }

    /// Calls an export that replies.
    pub fn call<P: WasmParams>(&mut self, name: &str, params: P) -> Reply {
        let packed: u64 = self.raw(name, params);
        let (pointer, len) = ((packed >> 32) as u32, packed as u32);
        let mut text = vec![0; len as usize];
        self.memory.read(&self.store, pointer as usize, &mut text).expect("a reply in memory");
        self.raw::<_, ()>("starling_free", pointer);
        let mut reply: Value = serde_json::from_slice(&text).expect("a reply in JSON");
        if reply.get("ok").is_some() {
            return Ok(reply["ok"].take());
        }
        let field = |name: &str| reply["error"][name].as_str().expect("a text").to_owned();
        Err((field("kind"), field("message")))
    }

    /// A buffer of the module with those bytes.
    pub fn buffer(&mut self, bytes: &[u8]) -> u32 {
        let pointer: u32 = self.raw("starling_alloc", bytes.len() as u32);
        assert_ne!(pointer, 0, "no memory for {} bytes", bytes.len());
        self.memory.write(&mut self.store, pointer as usize, bytes).expect("a buffer in memory");
        pointer
    }

    /// Calls an export that takes a loader or a session, and bytes.
    pub fn call_with(&mut self, name: &str, id: u32, bytes: &[u8]) -> Reply {
        let buffer = self.buffer(bytes);
        self.call(name, (id, buffer))
    }

    /// Opens a session with a model that comes in pieces of so many bytes.
    pub fn open(&mut self, model: &[u8], piece: usize, options: &str) -> std::result::Result<u32, (String, String)> {
        let loader: u32 = self.raw("starling_loader", (model.len() as u64, 0u32));
        for bytes in model.chunks(piece) {
            self.call_with("starling_feed", loader, bytes)?;
        }
        self.call_with("starling_open", loader, options.as_bytes()).map(|id| id.as_u64().expect("an id") as u32)
    }

    /// Opens a session with a split model, whose parts come in pieces of so many bytes.
    pub fn open_split(
        &mut self,
        parts: &[&[u8]],
        piece: usize,
        options: &str,
    ) -> std::result::Result<u32, (String, String)> {
        let lens = format!("{:?}", parts.iter().map(|part| part.len()).collect::<Vec<_>>());
        let lens = self.buffer(lens.as_bytes());
        let loader = self.call("starling_split_loader", (lens, 0u32))?.as_u64().expect("an id") as u32;
        let mut pieces: Vec<_> = parts.iter().map(|part| part.chunks(piece)).collect();
        let feed = |m: &mut Starling, i: usize, bytes: &[u8]| {
            let bytes = m.buffer(bytes);
            m.call("starling_feed_part", (loader, i as u32, bytes)).map(|known| known == true)
        };
        for (i, pieces) in pieces.iter_mut().enumerate() {
            while let Some(bytes) = pieces.next() {
                if feed(self, i, bytes)? {
                    break;
                }
            }
        }
        for (i, pieces) in pieces.into_iter().enumerate() {
            for bytes in pieces {
                feed(self, i, bytes)?;
            }
        }
        self.call_with("starling_open", loader, options.as_bytes()).map(|id| id.as_u64().expect("an id") as u32)
    }

    /// Bytes of its memory.
    pub fn memory_bytes(&self) -> usize {
        self.memory.data_size(&self.store)
    }
}
