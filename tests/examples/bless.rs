//! Writes the pinned results anew, from the scalar definition. Explain the difference in the commit.

use std::error::Error;
use std::fs;
use std::sync::Arc;

use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::{architecture, embedding, golden};

fn main() -> Result<(), Box<dyn Error>> {
    for case in golden::cases() {
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline)?);
        let pinned = case.compute(&model, Cpu::SCALAR, &Inline, 512, 0);
        fs::write(case.path(), serde_json::to_string_pretty(&pinned)? + "\n")?;
        println!("{}: {:?}", case.name, pinned.text);
    }
    let mut architectures = golden::Architectures::new();
    for recipe in architecture::recipes() {
        // refused, until the engine supports it
        let Ok(model) = Model::load(&recipe.file(Dtype::Q8_0), &Inline).map(Arc::new) else { continue };
        architectures.insert(recipe.name.clone(), golden::architecture_digest(&recipe, &model, Cpu::SCALAR, 8));
    }
    fs::write(golden::architectures_path(), serde_json::to_string_pretty(&architectures)? + "\n")?;
    fs::write(golden::trace_path(), golden::trace(Cpu::SCALAR, &Inline))?;
    for case in embedding::cases() {
        let model = Arc::new(Model::load(&case.model_bytes(), &Inline)?);
        let pinned = case.compute(&model, Cpu::SCALAR, &Inline, 2);
        fs::write(case.path(), serde_json::to_string_pretty(&pinned)? + "\n")?;
        println!("{}: {}", case.name, pinned.pooling);
    }
    Ok(())
}
