//! Writes the pinned results anew, from the scalar definition. Explain the difference in the commit.

use std::error::Error;
use std::fs;
use std::sync::Arc;

use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Inline;
use starling_tests::{embedding, golden};

fn main() -> Result<(), Box<dyn Error>> {
    for case in golden::cases() {
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline)?);
        let pinned = case.compute(&model, Cpu::SCALAR, &Inline, 512, 0);
        fs::write(case.path(), serde_json::to_string_pretty(&pinned)? + "\n")?;
        println!("{}: {:?}", case.name, pinned.text);
    }
    fs::write(golden::trace_path(), golden::trace(Cpu::SCALAR, &Inline))?;
    for case in embedding::cases() {
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline)?);
        let pinned = case.compute(&model, Cpu::SCALAR, &Inline, 2);
        fs::write(case.path(), serde_json::to_string_pretty(&pinned)? + "\n")?;
        println!("{}: {}", case.name, pinned.pooling);
    }
    Ok(())
}
