use sfv::{ListEntry, Parser};

use super::*;

const DIGEST: &str =
    "sha-512=:WZDPaVn/7XgHaAy8pmojAkGWoRx2UFChF41A2svX+TaPm+AbwAgBWnrIiYllu7BNNyealdVLvRwEmTHWXvJwew==:";

fn list(text: &str) -> InnerList {
    let list: sfv::List = Parser::new(text).parse().unwrap();
    match list.into_iter().next() {
        Some(ListEntry::InnerList(list)) => list,
        other => panic!("{other:?}"),
    }
}

/// `test-request` of RFC 9421, section B.2.
fn test_headers() -> HeaderMap {
    let fields = [
        ("host", "example.com"),
        ("date", "Tue, 20 Apr 2021 02:07:55 GMT"),
        ("content-type", "application/json"),
        ("content-digest", DIGEST),
        ("content-length", "18"),
    ];
    fields.into_iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

fn base_of(uri: &str, headers: &HeaderMap, components: &str) -> Result<String, BaseError> {
    let uri = uri.parse().unwrap();
    let request = Request { method: &Method::POST, uri: &uri, headers, scheme: &Scheme::HTTPS, has_body: true };
    signature_base(&Message::Request(request), &list(components))
}

/// RFC 9421, section B.2.3.
#[test]
fn base_of_rfc_9421_full_coverage() {
    let input = "(\"date\" \"@method\" \"@path\" \"@query\" \"@authority\" \"content-type\" \"content-digest\" \
                 \"content-length\");created=1618884473;keyid=\"test-key-rsa-pss\"";
    let expected = format!(
        "\"date\": Tue, 20 Apr 2021 02:07:55 GMT\n\"@method\": POST\n\"@path\": /foo\n\
         \"@query\": ?param=Value&Pet=dog\n\
         \"@authority\": example.com\n\"content-type\": application/json\n\"content-digest\": {DIGEST}\n\
         \"content-length\": 18\n\"@signature-params\": {input}"
    );
    assert_eq!(base_of("/foo?param=Value&Pet=dog", &test_headers(), input).unwrap(), expected);
}

fn value_of(uri: &str, headers: &HeaderMap, component: &str) -> Result<String, BaseError> {
    let base = base_of(uri, headers, &format!("(\"{component}\")"))?;
    let value = base.strip_prefix(&format!("\"{component}\": ")).unwrap();
    Ok(value.strip_suffix(&format!("\n\"@signature-params\": (\"{component}\")")).unwrap().into())
}

/// RFC 9421, section 2.2.
#[test]
fn derived_components() {
    let headers = test_headers();
    let absolute = "https://www.Example.com:443/path?param=value";
    for (uri, component, expected) in [
        ("/path?param=value", "@method", "POST"),
        (absolute, "@target-uri", "https://www.example.com/path?param=value"),
        ("/path?param=value", "@target-uri", "https://example.com/path?param=value"),
        (absolute, "@authority", "www.example.com"),
        ("/path", "@authority", "example.com"),
        ("http://www.example.com/", "@scheme", "http"),
        ("/", "@scheme", "https"),
        ("/path?param=value", "@request-target", "/path?param=value"),
        (absolute, "@request-target", "/path?param=value"),
        ("/path?param=value", "@path", "/path"),
        ("http://a", "@path", "/"),
        ("/path?param=value&foo=bar&baz=bat%2Dman", "@query", "?param=value&foo=bar&baz=bat%2Dman"),
        ("/path?queryString", "@query", "?queryString"),
        ("/path?", "@query", "?"),
        ("/path", "@query", "?"),
    ] {
        assert_eq!(value_of(uri, &headers, component).as_deref(), Ok(expected), "{uri} {component}");
    }
    for component in ["@path", "@target-uri", "@request-target"] {
        let found = value_of("example.com:443", &headers, component);
        assert!(matches!(found, Err(BaseError::Absent { .. })), "{component}");
    }
}

#[test]
fn hosts() {
    for (host, expected) in [
        ("Example.COM:443", Some("example.com")),
        ("example.com:80", Some("example.com:80")),
        ("[::1]:8080", Some("[::1]:8080")),
        ("", None),
        ("user@example.com", None),
    ] {
        let headers = [(HOST, host.parse().unwrap())].into_iter().collect();
        assert_eq!(value_of("/", &headers, "@authority").ok().as_deref(), expected, "{host}");
    }
    let mut headers = test_headers();
    headers.append(HOST, "other".parse().unwrap());
    assert!(matches!(value_of("/", &headers, "@authority"), Err(BaseError::Absent { .. })));
    assert!(matches!(value_of("/", &HeaderMap::new(), "@authority"), Err(BaseError::Absent { .. })));
}

/// RFC 9421, section 2.1.
#[test]
fn header_fields() {
    let mut headers = HeaderMap::new();
    headers.append("x", "  one ".parse().unwrap());
    headers.append("x", "\ttwo, three".parse().unwrap());
    headers.append("empty", "".parse().unwrap());
    headers.append("latin", axum::http::HeaderValue::from_bytes(b"a\xe9").unwrap());
    headers.append("utf8", axum::http::HeaderValue::from_bytes("é".as_bytes()).unwrap());
    assert_eq!(value_of("/", &headers, "x").unwrap(), "one, two, three");
    assert_eq!(value_of("/", &headers, "empty").unwrap(), "");
    assert!(matches!(value_of("/", &headers, "absent"), Err(BaseError::Absent { .. })));
    for name in ["latin", "utf8"] {
        assert!(matches!(value_of("/", &headers, name), Err(BaseError::Characters { .. })), "{name}");
    }
}

#[test]
fn invalid_components_are_refused() {
    let base = |components: &str| base_of("/", &test_headers(), components);
    for wrong in ["Date", "@query-param", "@signature-params", "@", "a b", "a: b", "x\\\": y", ""] {
        assert!(matches!(base(&format!("(\"{wrong}\")")), Err(BaseError::Name { .. })), "{wrong}");
    }
    for wrong in ["date", "1", ":AA==:", "\"date\";sf", "\"date\";bs", "\"date\";key=\"a\"", "\"date\";req=?0"] {
        assert!(matches!(base(&format!("({wrong})")), Err(BaseError::NotAComponent { .. })), "{wrong}");
    }
    for wrong in ["\"@status\"", "\"date\";req", "\"@method\";req"] {
        assert!(matches!(base(&format!("({wrong})")), Err(BaseError::Absent { .. })), "{wrong}");
    }
    assert!(matches!(base("(\"date\" \"@path\" \"date\")"), Err(BaseError::Twice { .. })));
    let many: Vec<String> = (0..65).map(|i| format!("\"x{i}\"")).collect();
    assert_eq!(base(&format!("({})", many.join(" "))), Err(BaseError::Many { found: 65 }));
    assert_eq!(base("()"), Ok("\"@signature-params\": ()".into()));
}

/// `http` types cannot hold line breaks, which would add lines to the base.
#[test]
fn line_breaks_are_not_representable() {
    for text in ["/a\nb", "/a\r\n\"@method\": GET", "/a b?c\td"] {
        assert!(text.parse::<Uri>().is_err(), "{text:?}");
    }
    assert!("a\n\"@method\": GET".parse::<axum::http::HeaderValue>().is_err());
    assert!(Method::from_bytes(b"GET\n").is_err());
}
