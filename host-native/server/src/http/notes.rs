//! Middleware that lets a response carry what was found out about its request.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;

use crate::server::{Caller, ResponseNotes};

/// Adds the notes of the caller to the response.
pub async fn carry_notes(request: Request, next: Next) -> Response {
    let notes = request.extensions().get::<Caller>().map(|caller| Arc::clone(&caller.notes));
    let mut response = next.run(request).await;
    if let Some(notes) = notes {
        response.extensions_mut().insert(notes);
    }
    response
}

/// The notes that a response carries.
pub fn notes(response: &Response) -> Arc<ResponseNotes> {
    response.extensions().get::<Arc<ResponseNotes>>().map(Arc::clone).unwrap_or_default()
}
