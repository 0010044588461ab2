//! Compiles output constraints, on blocking threads.

use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};
use starling::sampler::Constraint;
use starling::structure::{Calls, Form, StructureError};
use starling_api::structure::{ConstraintPlan, FormPlan, OutputConstraint, compile_error, param_of};
use starling_api::tools::AllowedCalls;

use super::super::models::instance::ModelInstance;
use super::super::trace::Trace;
use super::error::ApiError;

/// A compiled constraint.
pub struct Compiled {
    pub constraint: Arc<dyn Constraint>,
    /// Digest of what it was compiled from.
    pub form: [u8; 32],
}

impl Compiled {
    /// The constraint and the digest of a request that may have one.
    pub fn unzip(compiled: Option<Compiled>) -> (Option<Arc<dyn Constraint>>, Option<[u8; 32]>) {
        compiled.map(|Compiled { constraint, form }| (constraint, form)).unzip()
    }
}

/// Compiles a form; `param` is the path of the request field that defines it.
///
/// # Errors
/// The error in the schema or grammar.
pub async fn compile_form(instance: &Arc<ModelInstance>, param: String, form: Form) -> Result<Compiled, ApiError> {
    // every field is in the text, and equal forms have equal texts
    let digest = Sha256::digest(format!("{form:?}")).into();
    let work =
        move |instance: &ModelInstance| instance.grammars.constraint(&instance.model, &form).map_err(|e| (param, e));
    Ok(Compiled { constraint: compile(instance, work).await?, form: digest })
}

/// Compiles the constraint of a chat completion.
///
/// # Errors
/// The error, and the path of its field.
pub async fn compile_plan(instance: &Arc<ModelInstance>, plan: ConstraintPlan) -> Result<Compiled, ApiError> {
    let digest = Sha256::digest(format!("{plan:?}")).into();
    let AllowedCalls { tools, callable, is_forced, parallel, style, answer } = match plan {
        ConstraintPlan::Form(FormPlan { form, param }) => return compile_form(instance, param, form).await,
        ConstraintPlan::Calls(calls) => calls,
    };
    let (param, form) = answer.unzip();
    let work = move |instance: &ModelInstance| {
        let calls = Calls::with_style(*style, &tools, callable, is_forced, parallel);
        let result = instance.grammars.calls(&instance.model, &calls, form.as_ref());
        result.map_err(|(part, e)| (param_of(part, param), e))
    };
    Ok(Compiled { constraint: compile(instance, work).await?, form: digest })
}

/// The compiled output constraint of a request, if it has one.
///
/// # Errors
/// The error, and the path of its field.
pub async fn compile_constraint(
    instance: &Arc<ModelInstance>,
    constraint: OutputConstraint,
) -> Result<Option<Compiled>, ApiError> {
    match constraint.form()? {
        None => Ok(None),
        Some((param, form)) => compile_form(instance, param, form).await.map(Some),
    }
}

async fn compile(
    instance: &Arc<ModelInstance>,
    work: impl FnOnce(&ModelInstance) -> Result<Arc<dyn Constraint>, (String, StructureError)> + Send + 'static,
) -> Result<Arc<dyn Constraint>, ApiError> {
    let (start, inner) = (Instant::now(), Arc::clone(instance));
    let result = tokio::task::spawn_blocking(move || work(&inner)).await;
    Trace::current().stage("grammar", start, Instant::now(), &[]);
    result
        .map_err(|_| ApiError::internal("compiling the grammar failed"))?
        .map_err(|(param, e)| compile_error(&param, &e))
}
