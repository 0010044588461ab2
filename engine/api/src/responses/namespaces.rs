//! Tools of type `namespace`, in which Codex groups the functions of an MCP server. A model is offered them under flat names;
//! a call and the items of a conversation have name and namespace.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::wrong;

/// Functions of namespaces in one request, at most.
const MAX_FUNCTIONS: usize = 4096;

/// The name under which the function `name` of a namespace is offered to the model: as vLLM and Codex join them.
pub(crate) fn flat_name(namespace: &str, name: &str) -> String {
    let separator = if namespace.ends_with('_') || name.starts_with('_') { "" } else { "__" };
    format!("{namespace}{separator}{name}")
}

/// The namespaces and names of functions, by their flat names.
#[derive(Debug, Clone, Default)]
pub(crate) struct Namespaces(BTreeMap<String, (String, String)>);

impl Namespaces {
    /// Those of the tools of a request. Tools that are not well formed are passed over: [`flatten`] refuses them.
    pub(crate) fn of(tools: &[Value]) -> Namespaces {
        let mut all = BTreeMap::new();
        for tool in tools.iter().filter(|tool| tool["type"] == "namespace") {
            let Some(namespace) = tool["name"].as_str() else { continue };
            let names = tool["tools"].as_array().into_iter().flatten().filter_map(|function| function["name"].as_str());
            for name in names.take(MAX_FUNCTIONS) {
                all.insert(flat_name(namespace, name), (namespace.to_string(), name.to_string()));
            }
        }
        Namespaces(all)
    }

    /// Namespace and name of a call of the model.
    pub(crate) fn resolve(&self, flat: String) -> (Option<String>, String) {
        match self.0.get(&flat) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, flat),
        }
    }
}

/// The tools of a request without namespaces: their functions stand under flat names, each with its path in the request.
///
/// # Errors
/// A namespace that is not well formed, or two functions with the same name.
pub(crate) fn flatten(tools: Vec<Value>) -> Result<Vec<(String, Value)>, ApiError> {
    let mut flat: Vec<(String, Value)> = Vec::new();
    for (i, mut tool) in tools.into_iter().enumerate() {
        let at = format!("tools[{i}]");
        if tool["type"] != "namespace" {
            flat.push((at, tool));
            continue;
        }
        let Some(namespace) = tool["name"].as_str().map(str::to_string) else {
            return Err(wrong(&format!("{at}.name"), "is missing or not a string"));
        };
        let Some(Value::Array(functions)) = tool.get_mut("tools").map(Value::take) else {
            return Err(wrong(&format!("{at}.tools"), "is missing or not a list"));
        };
        for (j, mut function) in functions.into_iter().enumerate() {
            let at = format!("{at}.tools[{j}]");
            if flat.len() >= MAX_FUNCTIONS {
                return Err(wrong(&at, &format!("is one too many, expected at most {MAX_FUNCTIONS} tools")));
            }
            if let Some(name) = function["name"].as_str() {
                let name = flat_name(&namespace, name);
                if flat.iter().any(|(_, other)| other["name"] == *name) {
                    return Err(wrong(&format!("{at}.name"), "is, with its namespace, the name of another tool"));
                }
                function["name"] = name.into();
            }
            flat.push((at, function));
        }
    }
    Ok(flat)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_joined_and_found_again() {
        let of = |namespace: &str| json!({ "type": "namespace", "name": namespace, "tools": [{ "type": "function", "name": "run" }] });
        let tools = vec![of("mcp__a"), of("mcp__b__"), json!({ "type": "function", "name": "run" })];
        let names = Namespaces::of(&tools);
        for (flat, namespace, name) in [
            ("mcp__a__run", Some("mcp__a"), "run"),
            ("mcp__b__run", Some("mcp__b__"), "run"),
            ("run", None, "run"),
            ("mcp__c__run", None, "mcp__c__run"),
        ] {
            assert_eq!(names.resolve(flat.into()), (namespace.map(str::to_string), name.to_string()));
        }
        let flat = flatten(tools).expect("tools");
        let found: Vec<_> = flat.iter().map(|(at, tool)| (&**at, tool["name"].as_str().unwrap_or_default())).collect();
        assert_eq!(
            found,
            [("tools[0].tools[0]", "mcp__a__run"), ("tools[1].tools[0]", "mcp__b__run"), ("tools[2]", "run")]
        );
    }

    #[test]
    fn errors_name_the_field() {
        for (tools, param) in [
            (json!([{ "type": "namespace", "tools": [] }]), "tools[0].name"),
            (json!([{ "type": "namespace", "name": "n", "tools": {} }]), "tools[0].tools"),
            (
                json!([{ "type": "function", "name": "n__f" }, { "type": "namespace", "name": "n", "tools": [{ "name": "f" }] }]),
                "tools[1].tools[0].name",
            ),
        ] {
            let tools = tools.as_array().cloned().unwrap_or_default();
            assert_eq!(flatten(tools).map_err(|e| e.param), Err(Some(param.to_string())));
        }
    }
}
