//! Cost of the parser of answers: `cargo run --release -p starling-api --example output_bench`. Prints nanoseconds per token
//! of four bytes, for text and for calls of each form.

use std::time::Instant;

use serde_json::json;
use starling_api::output::{CALL_SYNTAXES, ModelSyntax, OutputPlan, SyntaxNames};
use starling_api::tools::CallIds;

const N_TOKENS: usize = 200_000;

fn main() {
    let tools = [
        json!({ "function": { "name": "weather", "parameters": { "properties": { "city": { "type": "string" } } } } }),
    ];
    let text = "The weather in Oslo is fine today, with a < b and 3 {braces}.\n";
    let call =
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": [1, 2, 3]}}</tool_call>\n";
    let argument = format!(
        "<tool_call>{{\"name\": \"weather\", \"arguments\": {{\"city\": \"{}\"}}}}",
        text.trim().repeat(N_TOKENS)
    );
    let measure = |label: &str, form: &str, text: &str| {
        let names = SyntaxNames { calls: Some(form), reasoning: Some("think") };
        let plan = OutputPlan::new(ModelSyntax::default(), names).tools(tools.clone().into(), CallIds::default());
        let text = text.repeat(4 * N_TOKENS / text.len() + 1);
        let mut parser = plan.parser(0);
        let (mut n_pieces, start) = (0, Instant::now());
        for i in 0..N_TOKENS {
            n_pieces += parser.push(&text[4 * i..4 * i + 4]).len();
        }
        n_pieces += parser.finish(true).len();
        println!(
            "{label:32} {:6.0} ns per token, {n_pieces} pieces",
            start.elapsed().as_secs_f64() * 1e9 / N_TOKENS as f64
        );
    };
    CALL_SYNTAXES.iter().for_each(|form| measure(form.name, form.name, text));
    measure("hermes, calls", "hermes", call);
    measure("hermes, one argument", "hermes", &argument);
    measure("hermes, reasoning", "hermes", &format!("<think>{}", text.repeat(4 * N_TOKENS / text.len() + 1)));
}
