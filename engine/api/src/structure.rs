//! Output constraints of a request, by the names of OpenAI, llama-server and vLLM.

use serde::Deserialize;
#[cfg(feature = "grammar-sources")]
use serde::Serialize;
use serde_json::Value;
#[cfg(feature = "grammar-sources")]
use starling::grammar_source::GrammarSource;
#[cfg(feature = "structure")]
use starling::structure::{CallsPart, StructureError};

use crate::error::ApiError;
#[cfg(feature = "grammar-sources")]
use crate::tools::{AllowedCalls, RenderedTools};

/// Output constraint; at most one of these fields. A schema is enforced, strict or not. A keyword that cannot be enforced is
/// refused by name.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputConstraint {
    /// OpenAI: `{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {...}}`.
    pub response_format: Option<ResponseFormat>,
    /// JSON schema of the output (llama-server).
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub json_schema: Option<Value>,
    /// Grammar of the output, in llama.cpp's GBNF or in the Lark syntax of llguidance (field name of llama-server).
    pub grammar: Option<String>,
    /// vLLM's output constraints.
    pub structured_outputs: Option<StructuredOutputs>,
    /// JSON schema of the output, as an object or a string (older vLLM).
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub guided_json: Option<Value>,
    /// Regular expression that matches the whole output (older vLLM).
    pub guided_regex: Option<String>,
    /// Strings, one of which is the output (older vLLM).
    pub guided_choice: Option<Vec<String>>,
    /// Grammar of the output in Lark syntax (older vLLM).
    pub guided_grammar: Option<String>,
}

/// Format of the output.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Schema, if `type` is `json_schema`.
    pub json_schema: Option<NamedSchema>,
    /// Schema where llama-server expects it, if `type` is `json_object` or `json_schema`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub schema: Option<Value>,
}

/// Named schema. `name`, `description` and `strict` are accepted and have no effect: the output always follows the
/// schema.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NamedSchema {
    /// JSON schema of the output.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub schema: Option<Value>,
}

/// vLLM's output constraints; one of these fields.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StructuredOutputs {
    /// JSON schema of the output, as an object or a string.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub json: Option<Value>,
    /// Regular expression that matches the whole output.
    pub regex: Option<String>,
    /// Strings, one of which is the output.
    pub choice: Option<Vec<String>>,
    /// Grammar of the output in Lark syntax.
    pub grammar: Option<String>,
    /// Output any JSON object.
    pub json_object: Option<bool>,
}

impl OutputConstraint {
    /// The form of the output, with the path of the field that defines it; `None` for free text.
    ///
    /// # Errors
    /// A field that defines no form, or two fields that define one.
    #[cfg(feature = "grammar-sources")]
    pub fn source(self) -> Result<Option<(String, GrammarSource)>, ApiError> {
        let response_format = self.response_format.map(ResponseFormat::source).transpose()?.flatten();
        let outputs = self.structured_outputs.unwrap_or_default();
        let lark = |text| GrammarSource::Lark(text, Vec::new());
        let is_object = outputs.json_object == Some(true);
        let forms = [
            response_format,
            schema("json_schema", self.json_schema)?,
            named("grammar", self.grammar.map(lark)),
            schema("structured_outputs.json", outputs.json)?,
            named("structured_outputs.regex", outputs.regex.map(GrammarSource::Regex)),
            named("structured_outputs.choice", outputs.choice.map(GrammarSource::Choice)),
            named("structured_outputs.grammar", outputs.grammar.map(lark)),
            named("structured_outputs.json_object", is_object.then(GrammarSource::object)),
            schema("guided_json", self.guided_json)?,
            named("guided_regex", self.guided_regex.map(GrammarSource::Regex)),
            named("guided_choice", self.guided_choice.map(GrammarSource::Choice)),
            named("guided_grammar", self.guided_grammar.map(lark)),
        ];
        let mut forms = forms.into_iter().flatten();
        let (first, second) = (forms.next(), forms.next());
        if let (Some((first, _)), Some((second, _))) = (&first, second) {
            return Err(ApiError::param(
                &second,
                format!("{second} and {first} are both given, expected at most one output constraint"),
            ));
        }
        Ok(first)
    }
}

#[cfg(feature = "grammar-sources")]
fn named(param: &str, source: Option<GrammarSource>) -> Option<(String, GrammarSource)> {
    source.map(|source| (param.into(), source))
}

/// Parses a schema, given as an object or as a string of JSON.
#[cfg(feature = "grammar-sources")]
fn schema(param: &str, value: Option<Value>) -> Result<Option<(String, GrammarSource)>, ApiError> {
    let value = match value {
        None => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text)
            .map_err(|e| ApiError::param(param, format!("{param} is a string that is not JSON: {e}")))?,
        Some(value) => value,
    };
    Ok(named(param, Some(GrammarSource::Schema(value))))
}

#[cfg(feature = "grammar-sources")]
impl ResponseFormat {
    fn source(self) -> Result<Option<(String, GrammarSource)>, ApiError> {
        let own = schema("response_format.schema", self.schema)?;
        match self.kind.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(own.or_else(|| named("response_format", Some(GrammarSource::object())))),
            "json_schema" => {
                let given = self.json_schema.and_then(|named| named.schema);
                let param = "response_format.json_schema.schema";
                let given = schema(param, given)?.or(own);
                given.map(Some).ok_or_else(|| ApiError::param(param, format!("{param} is missing")))
            }
            kind => {
                let message = format!("response_format.type is {kind:?}, expected text, json_object or json_schema");
                Err(ApiError::param("response_format.type", message))
            }
        }
    }
}

/// The constraint of an answer, before it is compiled. Its JSON is what the grammar module of the page takes.
#[cfg(feature = "grammar-sources")]
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ConstraintPlan {
    /// An output constraint without tool calls.
    Grammar(GrammarPlan),
    /// Tool calls, or either tool calls or an output constraint.
    Calls(AllowedCalls),
}

/// An output constraint, and the request field that defines it.
#[cfg(feature = "grammar-sources")]
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct GrammarPlan {
    /// The output constraint.
    pub source: GrammarSource,
    /// Path of the field.
    #[serde(skip)]
    pub param: String,
}

/// The constraint of an answer with the tools `tools` of its request and the output constraint `form`.
///
/// # Errors
/// If a call is forced and there is an output constraint too.
#[cfg(feature = "grammar-sources")]
pub fn constraint_plan(
    source: Option<(String, GrammarSource)>,
    tools: &mut RenderedTools,
) -> Result<Option<ConstraintPlan>, ApiError> {
    match (source, tools.calls.take()) {
        (Some((param, _)), _) if tools.is_forced => {
            Err(ApiError::param(&param, format!("{param} is given, but tool_choice asks for a call")))
        }
        (Some(source), Some(calls)) => Ok(Some(ConstraintPlan::Calls(AllowedCalls { answer: Some(source), ..calls }))),
        (Some((param, source)), None) => Ok(Some(ConstraintPlan::Grammar(GrammarPlan { source, param }))),
        (None, Some(calls)) if tools.is_constrained => Ok(Some(ConstraintPlan::Calls(calls))),
        (None, _) => Ok(None),
    }
}

/// The path of the request field that part `part` of a grammar comes from; `param` is the path of the output constraint.
#[cfg(feature = "structure")]
pub fn param_of(part: CallsPart, param: Option<String>) -> String {
    match part {
        CallsPart::Tool(i) => format!("tools[{i}].function.parameters"),
        CallsPart::Tools => "tools".into(),
        CallsPart::Answer => param.unwrap_or_default(),
    }
}

/// The error of a constraint that does not compile; `param` is the path of its field.
#[cfg(feature = "structure")]
pub fn compile_error(param: &str, e: &StructureError) -> ApiError {
    let is_about_model = matches!(e, StructureError::Vocabulary(_));
    let code = if is_about_model { "unsupported_parameter" } else { "invalid_grammar" };
    ApiError::param(param, format!("{param}: {e}")).code(code)
}

#[cfg(not(feature = "grammar-sources"))]
impl OutputConstraint {
    /// Checks that the request has no output constraint, which this build does not enforce.
    ///
    /// # Errors
    /// The first field with a constraint.
    pub fn check_absent(&self) -> Result<(), ApiError> {
        let is_text = |format: &ResponseFormat| format.kind == "text";
        let fields = [
            ("response_format", self.response_format.as_ref().is_some_and(|format| !is_text(format))),
            ("json_schema", self.json_schema.is_some()),
            ("grammar", self.grammar.is_some()),
            ("structured_outputs", self.structured_outputs.is_some()),
            ("guided_json", self.guided_json.is_some()),
            ("guided_regex", self.guided_regex.is_some()),
            ("guided_choice", self.guided_choice.is_some()),
            ("guided_grammar", self.guided_grammar.is_some()),
        ];
        match fields.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => Err(ApiError::unsupported(name, "this build of Starling does not constrain outputs")),
            None => Ok(()),
        }
    }
}
