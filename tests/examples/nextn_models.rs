//! Writes the models of `tests/mtp.rs` to a directory, for `tests/scripts/make_mtp_cases.py`: recipes with one more layer for
//! multi-token prediction.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use starling::quant::Dtype;
use starling_tests::architecture::recipe;

const FAMILIES: [&str; 8] =
    ["qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2", "hy_v3", "cohere2moe", "step35"];

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("expected a directory")?);
    for name in FAMILIES {
        let mut recipe = recipe(name);
        recipe.add_nextn_layer();
        fs::write(folder.join(format!("{name}.gguf")), recipe.file(Dtype::F32))?;
    }
    Ok(())
}
