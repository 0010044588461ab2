//! Runs a wasm32-wasip1 program in wasmtime, with the repository and the current directory open at their own paths:
//! `wasi-run program.wasm args...`

use wasmtime::{Linker, Module, Result, Store, bail};
use wasmtime_wasi::p1::{WasiP1Ctx, add_to_linker_sync};
use wasmtime_wasi::{DirPerms, FilePerms, I32Exit, WasiCtx};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(program) = args.first() else { bail!("usage: wasi-run program.wasm args...") };
    let engine = wasi_run::engine()?;
    let mut linker: Linker<WasiP1Ctx> = Linker::new(&engine);
    add_to_linker_sync(&mut linker, |ctx| ctx)?;

    let repository = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let repository = std::fs::canonicalize(repository)?.to_string_lossy().into_owned();
    let mut wasi = WasiCtx::builder();
    wasi.inherit_stdio().inherit_env().args(&args);
    for (host, guest) in [(repository.as_str(), repository.as_str()), (".", ".")] {
        wasi.preopened_dir(host, guest, DirPerms::all(), FilePerms::all())?;
    }
    let mut store = Store::new(&engine, wasi.build_p1());
    let instance = linker.instantiate(&mut store, &Module::from_file(&engine, program)?)?;
    match instance.get_typed_func::<(), ()>(&mut store, "_start")?.call(&mut store, ()) {
        Ok(()) => Ok(()),
        Err(e) => match e.downcast_ref::<I32Exit>() {
            Some(exit) => std::process::exit(exit.0),
            None => Err(e),
        },
    }
}
