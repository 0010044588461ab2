//! Bounds what a host builds from the tools of a request before their constraint has a size: where arguments are written one
//! by one, each parameter has its own schema, with a copy of all definitions.

use alloc::string::ToString;
use core::ops::Range;

use serde_json::Value;

use super::{CallsPart, StructureError, Structures};
use crate::grammar_source::CallStyle;

impl Structures {
    /// Checks the size of the schemas of `tools[callable]` before [`Calls`](super::Calls) are made of them. The arguments are
    /// those of [`Calls::with_style`](super::Calls::with_style).
    ///
    /// # Errors
    /// The tool whose schemas are too long, together with those before it.
    pub fn check_tools(
        &self,
        style: &CallStyle,
        tools: &[Value],
        callable: Range<usize>,
        is_forced: bool,
    ) -> Result<(), (CallsPart, StructureError)> {
        let (most, mut found) = (self.limits.bytes, 0usize);
        let len = |value: &Value| if value.is_null() { 0 } else { value.to_string().len() };
        for (i, tool) in tools.iter().enumerate().take(callable.end).skip(callable.start) {
            let function = &tool["function"];
            if !is_forced && function["strict"] != true {
                continue;
            }
            let parameters = &function["parameters"];
            found = found.saturating_add(len(parameters));
            if style.params.is_some() {
                let n = parameters["properties"].as_object().map_or(0, serde_json::Map::len);
                let definitions = len(&parameters["$defs"]) + len(&parameters["definitions"]);
                found = found.saturating_add(definitions.saturating_mul(n));
            }
            if found > most {
                return Err((CallsPart::Tool(i), StructureError::TooLong { found, most }));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::String;

    use serde_json::json;

    use super::super::Limits;
    use super::*;
    use crate::grammar_source::ParamStyle;

    #[test]
    fn copies_of_definitions_count() {
        let structures = Structures::new(Limits { bytes: 10_000, ..Limits::DEFAULT });
        let properties: serde_json::Map<_, _> = (0..100).map(|i| (alloc::format!("p{i}"), json!({}))).collect();
        let parameters = json!({ "properties": properties, "$defs": { "d": { "enum": ["x".repeat(200)] } } });
        let tools = [json!({ "function": { "name": "f", "parameters": parameters } })];
        let text = String::new;
        let params = ParamStyle { key: text(), after_key: text(), after_value: text(), between: text(), quote: None };
        let (json_style, by_one) = (CallStyle::default(), CallStyle { params: Some(params), ..CallStyle::default() });
        assert_eq!(structures.check_tools(&json_style, &tools, 0..1, true), Ok(()));
        assert_eq!(structures.check_tools(&by_one, &tools, 0..1, false), Ok(()));
        let result = structures.check_tools(&by_one, &tools, 0..1, true);
        assert!(matches!(result, Err((CallsPart::Tool(0), StructureError::TooLong { .. }))), "{result:?}");
    }
}
