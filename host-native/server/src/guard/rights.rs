//! What a request may do to the models of the server, besides using them.

use axum::http::{HeaderMap, header};
use starling_api::error::ApiError;

use super::auth::Keys;
use crate::config::Settings;
use crate::guard::peer::Peer;

/// What a request may do to models; each includes those before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rights {
    /// Use models: a request loads the one that it names, unless `autoload` is off.
    #[default]
    Use,
    /// Load models, and unload those that are not pinned.
    Load,
    /// Add and remove models, and unload pinned ones.
    Manage,
}

/// Headers by which a proxy tells of the client behind it. Headers that begin with `x-forwarded-` are such, too.
const FORWARDING: [&str; 10] = [
    "forwarded",
    "via",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "x-original-forwarded-for",
    "x-envoy-external-address",
    "cf-connecting-ip",
    "true-client-ip",
    "fastly-client-ip",
];

impl Rights {
    /// Those of a request without an administrator's key: of a client on this machine if the server has no keys at all.
    pub fn without_key(
        settings: &Settings,
        keys: &Keys,
        has_admin_keys: bool,
        peer: Option<&Peer>,
        headers: &HeaderMap,
    ) -> Rights {
        let is_open = !has_admin_keys && !keys.are_needed();
        match is_open && peer.is_some_and(|peer| peer.address.is_loopback()) && is_direct(headers) {
            true if settings.manage_without_keys => Rights::Manage,
            true => Rights::Load,
            false => Rights::Use,
        }
    }

    /// # Errors
    /// 403, unless models may be added and removed.
    pub fn check_manages(self) -> Result<(), ApiError> {
        let message = "models are added and removed with the key of an administrator (--admin-key-file), or from this \
                       machine if the server has no keys and allows it (--manage-without-keys)";
        if self >= Rights::Manage { Ok(()) } else { Err(not_allowed(message)) }
    }

    /// # Errors
    /// 403, unless a model may be loaded and unloaded.
    pub fn check_loads(self, is_pinned: bool) -> Result<(), ApiError> {
        let message = "models are loaded and unloaded with the key of an administrator (--admin-key-file), or from this \
                       machine if the server has no keys";
        match self {
            Rights::Use => Err(not_allowed(message)),
            Rights::Load if is_pinned => Err(not_allowed("the model is pinned (--pin): only administrators unload it")),
            _ => Ok(()),
        }
    }
}

fn not_allowed(message: &str) -> ApiError {
    ApiError::new(403, "permission_error", message).code("not_allowed")
}

/// Whether a request comes from the client itself: no proxy has forwarded it, and no page of another origin sends it.
fn is_direct(headers: &HeaderMap) -> bool {
    let is_forwarded = |name: &str| FORWARDING.contains(&name) || name.starts_with("x-forwarded-");
    !headers.keys().any(|name| is_forwarded(name.as_str())) && is_own_origin(headers)
}

/// Whether a request has no `Origin`, or that of the server's own page. The `Host` was checked before.
fn is_own_origin(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = origins.next() else { return true };
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let own = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
    own.is_some() && own == host && origins.next().is_none()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    fn rights(address: &str, settings: Settings, has_admin_keys: bool, headers: &[(&str, &str)]) -> Rights {
        let peer = Peer { address: address.parse().unwrap(), certificate: None };
        let mut all: HeaderMap = [(header::HOST, "localhost:8080".parse().unwrap())].into_iter().collect();
        for (name, value) in headers {
            all.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        Rights::without_key(&settings, &Keys::new(&settings).unwrap(), has_admin_keys, Some(&peer), &all)
    }

    #[test]
    fn only_clients_on_this_machine_of_a_server_without_keys_change_models() {
        let open = |manages| Settings { manage_without_keys: manages, ..Settings::default() };
        let keyed = || Settings { api_key: Some("sk-a".into()), ..open(true) };
        assert_eq!(rights("127.0.0.1", open(false), false, &[]), Rights::Load);
        assert_eq!(rights("127.0.0.1", open(true), false, &[]), Rights::Manage);
        assert_eq!(rights("::1", open(true), false, &[]), Rights::Manage);
        assert_eq!(rights("10.0.0.1", open(true), false, &[]), Rights::Use);
        assert_eq!(rights("127.0.0.1", open(true), true, &[]), Rights::Use);
        assert_eq!(rights("127.0.0.1", keyed(), false, &[]), Rights::Use);
    }

    #[test]
    fn what_a_proxy_forwards_or_another_page_sends_is_not_local() {
        for (name, value) in [
            ("forwarded", "for=10.0.0.1"),
            ("x-forwarded-for", "10.0.0.1"),
            ("X-Forwarded-Proto", "https"),
            ("x-forwarded-anything", ""),
            ("x-real-ip", "127.0.0.1"),
            ("via", "1.1 proxy"),
            ("cf-connecting-ip", "10.0.0.1"),
            ("origin", "https://a.example"),
            ("origin", "null"),
            ("origin", "http://localhost:8081"),
            ("origin", "localhost:8080"),
        ] {
            let settings = Settings { manage_without_keys: true, ..Settings::default() };
            assert_eq!(rights("127.0.0.1", settings, false, &[(name, value)]), Rights::Use, "{name}: {value}");
        }
        let settings = || Settings { manage_without_keys: true, ..Settings::default() };
        let own = ("origin", "http://localhost:8080");
        assert_eq!(rights("127.0.0.1", settings(), false, &[own]), Rights::Manage);
        assert_eq!(rights("127.0.0.1", settings(), false, &[own, ("origin", "null")]), Rights::Use);
    }

    #[test]
    fn each_right_includes_those_before_it() {
        for (rights, manages, loads, unloads_pinned) in
            [(Rights::Use, false, false, false), (Rights::Load, false, true, false), (Rights::Manage, true, true, true)]
        {
            let all = [rights.check_manages(), rights.check_loads(false), rights.check_loads(true)];
            assert_eq!(all.map(|result| result.is_ok()), [manages, loads, unloads_pinned], "{rights:?}");
        }
    }
}
