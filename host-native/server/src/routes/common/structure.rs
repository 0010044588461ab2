//! Compiles output constraints, on blocking threads, in the slots of `compile_slots`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use sha2::{Digest, Sha256};
use starling::sampler::Constraint;
use starling::structure::{Calls, GrammarSource, StructureError};
use starling_api::structure::{ConstraintPlan, GrammarPlan, OutputConstraint, compile_error, param_of};
use starling_api::tools::AllowedCalls;

use crate::http::error::ApiError;
use crate::http::fields;
use crate::models::instance::ModelInstance;
use crate::observe::trace::Trace;
use crate::schedule::compile_slots::StopOnDrop;
use crate::server::{Caller, ResponseNotes, Server};

/// A compiled constraint.
pub struct Compiled {
    pub constraint: Arc<dyn Constraint>,
    /// Digest of what it was compiled from.
    pub source: [u8; 32],
}

impl Compiled {
    /// The constraint and the digest of a request that may have one.
    pub fn unzip(compiled: Option<Compiled>) -> (Option<Arc<dyn Constraint>>, Option<[u8; 32]>) {
        compiled.map(|Compiled { constraint, source }| (constraint, source)).unzip()
    }
}

/// What a compilation needs of its request.
pub struct Compilation<'a> {
    pub server: &'a Server,
    pub caller: &'a Caller,
    pub instance: &'a Arc<ModelInstance>,
}

type Work = Result<Arc<dyn Constraint>, (String, StructureError)>;

impl Compilation<'_> {
    /// Compiles a form; `param` is the path of the request field that defines it.
    ///
    /// # Errors
    /// The error in the schema or grammar.
    async fn source(&self, param: String, source: GrammarSource) -> Result<Compiled, ApiError> {
        // every field is in the text, and equal forms have equal texts
        let digest = Sha256::digest(format!("{source:?}")).into();
        let notes = Arc::clone(&self.caller.notes);
        let work = move |instance: &ModelInstance, stop: &AtomicBool| {
            let constraint = instance.grammars.constraint(&instance.model, &source, stop).map_err(|e| (param, e))?;
            note_unenforced(&notes, source.unenforced());
            Ok(constraint)
        };
        Ok(Compiled { constraint: self.compile(work).await?, source: digest })
    }

    /// Compiles the constraint of a chat completion.
    ///
    /// # Errors
    /// The error, and the path of its field.
    pub async fn plan(&self, plan: ConstraintPlan) -> Result<Compiled, ApiError> {
        let digest = Sha256::digest(format!("{plan:?}")).into();
        let AllowedCalls { tools, callable, is_forced, parallel, style, answer } = match plan {
            ConstraintPlan::Grammar(GrammarPlan { source, param }) => return self.source(param, source).await,
            ConstraintPlan::Calls(calls) => calls,
        };
        let (param, source) = answer.unzip();
        let notes = Arc::clone(&self.caller.notes);
        let work = move |instance: &ModelInstance, stop: &AtomicBool| {
            let checked = instance.grammars.check_tools(&style, &tools, callable.clone(), is_forced);
            checked.map_err(|(part, e)| (param_of(part, None), e))?;
            let calls = Calls::with_style(*style, &tools, callable, is_forced, parallel);
            let result = instance.grammars.calls(&instance.model, &calls, source.as_ref(), stop);
            let constraint = result.map_err(|(part, e)| (param_of(part, param), e))?;
            let of_calls = calls.source().unenforced();
            note_unenforced(&notes, source.iter().flat_map(GrammarSource::unenforced).chain(of_calls).collect());
            Ok(constraint)
        };
        Ok(Compiled { constraint: self.compile(work).await?, source: digest })
    }

    /// The compiled output constraint of a request, if it has one.
    ///
    /// # Errors
    /// The error, and the path of its field.
    pub async fn constraint(&self, constraint: OutputConstraint) -> Result<Option<Compiled>, ApiError> {
        match constraint.source()? {
            None => Ok(None),
            Some((param, source)) => self.source(param, source).await.map(Some),
        }
    }

    async fn compile(
        &self,
        work: impl FnOnce(&ModelInstance, &AtomicBool) -> Work + Send + 'static,
    ) -> Result<Arc<dyn Constraint>, ApiError> {
        let (start, inner) = (Instant::now(), Arc::clone(self.instance));
        let settings = self.instance.settings();
        let limit = settings.queue_timeout.min(settings.request_timeout);
        let deadline = (self.caller.arrival + limit).into();
        let slot = self.server.compile_slots.acquire(&self.caller.identity.tenant.name, deadline, limit).await?;
        // dropped with the request's future when its client leaves
        let stop = StopOnDrop::default();
        let flag = stop.flag();
        let work = move || {
            let _slot = slot;
            work(&inner, &flag)
        };
        let result = tokio::task::spawn_blocking(work).await;
        Trace::current().stage("grammar", start, Instant::now(), &[]);
        result
            .map_err(|_| ApiError::internal("compiling the grammar failed"))?
            .map_err(|(param, e)| compile_error(&param, &e))
    }
}

/// Names in a header of the response what is accepted and not enforced.
fn note_unenforced(notes: &ResponseNotes, mut names: Vec<String>) {
    names.sort_unstable();
    names.dedup();
    if !names.is_empty() {
        let _ = notes.unenforced.set(fields::header(&names));
    }
}
