//! What the runtime offers beyond JavaScript. Pages, workers and servers lack different parts, so each is looked up first.

use js_sys::Reflect;
use wasm_bindgen::prelude::*;
use web_sys::Performance;

/// A property of an object; `None` if it has none.
pub(crate) fn property<T: JsCast>(object: &JsValue, name: &str) -> Option<T> {
    let value = Reflect::get(object, &name.into()).ok()?;
    (!value.is_undefined() && !value.is_null()).then(|| value.unchecked_into())
}

/// A property of the global object.
pub(crate) fn global<T: JsCast>(name: &str) -> Option<T> {
    property(&js_sys::global(), name)
}

/// Milliseconds on a clock that is never set; NaN in a runtime without one. In workerd it stands still within a call.
pub(crate) fn now_ms() -> f64 {
    global::<Performance>("performance").map_or(f64::NAN, |performance| performance.now())
}
