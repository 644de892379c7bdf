//! Between our heads and those of the `http` crate, which `h2` speaks.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use policies::Scheme;

use crate::head::{Fields, RequestHead, ResponseHead};

/// Request fields that are the same from request to request and never hold a credential.
const PLAIN: [&str; 8] = [
    "accept",
    "accept-encoding",
    "accept-language",
    "content-type",
    "grpc-accept-encoding",
    "grpc-encoding",
    "te",
    "user-agent",
];

/// Why a head cannot be said in HTTP/2.
#[derive(Debug, thiserror::Error)]
#[error("{0} cannot be said in HTTP/2")]
pub struct Unsayable(&'static str);

/// The fields of a map, names in lower case as HTTP/2 has them.
pub fn fields(map: &HeaderMap) -> Fields {
    map.iter()
        .map(|(name, value)| {
            let name = Bytes::copy_from_slice(name.as_str().as_bytes());
            (name, Bytes::copy_from_slice(value.as_bytes()))
        })
        .collect()
}

/// The map of fields that were parsed before; a field that is none is left out.
pub fn map(fields: &Fields) -> HeaderMap {
    let mut map = HeaderMap::with_capacity(fields.len());
    for (name, value) in fields.iter() {
        let name = HeaderName::from_bytes(name);
        let value = HeaderValue::from_maybe_shared(value.clone());
        if let (Ok(name), Ok(value)) = (name, value) {
            map.append(name, value);
        }
    }
    map
}

/// A request head as HTTP/2 says it. The authority stands for `Host`.
pub fn request(head: &RequestHead) -> Result<http::Request<()>, Unsayable> {
    let mut fields = head.headers.clone();
    fields.remove_all("host");
    fields.remove_all("transfer-encoding");
    let scheme = match head.scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
    };
    let uri = http::Uri::builder()
        .scheme(scheme)
        .authority(head.authority.as_str())
        .path_and_query(&head.target[..])
        .build()
        .map_err(|_| Unsayable("the request target"))?;
    let method = http::Method::from_bytes(&head.method).map_err(|_| Unsayable("the method"))?;
    let mut request = http::Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.version_mut() = http::Version::HTTP_2;
    *request.headers_mut() = unindexed(map(&fields));
    Ok(request)
}

/// Keeps values that may be secret out of the compression tables of both sides, where they would
/// stay for as long as the connection does (RFC 7541, section 7.1.3). Any field may carry an
/// injected credential; those that never do are named.
fn unindexed(mut map: HeaderMap) -> HeaderMap {
    for (name, value) in &mut map {
        value.set_sensitive(!PLAIN.contains(&name.as_str()));
    }
    map
}

/// A response head as HTTP/2 says it.
pub fn response(head: &ResponseHead) -> Result<http::Response<()>, Unsayable> {
    let mut fields = head.headers.clone();
    fields.remove_all("transfer-encoding");
    let mut response = http::Response::new(());
    *response.status_mut() =
        http::StatusCode::from_u16(head.status).map_err(|_| Unsayable("the status"))?;
    *response.version_mut() = http::Version::HTTP_2;
    *response.headers_mut() = map(&fields);
    Ok(response)
}

/// Our form of a response that came over HTTP/2.
pub fn response_head(parts: &http::response::Parts) -> ResponseHead {
    ResponseHead {
        status: parts.status.as_u16(),
        reason: Bytes::new(),
        headers: fields(&parts.headers),
    }
}

/// HTTP/2 clients may split a cookie into several fields; HTTP/1.1 has one (RFC 9113 section
/// 8.2.3).
pub fn join_cookies(headers: &mut Fields) {
    if headers.all("cookie").count() < 2 {
        return;
    }
    let mut joined = BytesMut::new();
    for crumb in headers.all("cookie") {
        if !joined.is_empty() {
            joined.put_slice(b"; ");
        }
        joined.put_slice(crumb);
    }
    headers.set("cookie", joined.freeze());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_keeps_its_raw_target_and_loses_what_http2_has_no_place_for() {
        let mut headers = Fields::new();
        headers.append("Host", Bytes::from_static(b"a.test"));
        headers.append("X-A", Bytes::from_static(b"1"));
        headers.append("Transfer-Encoding", Bytes::from_static(b"chunked"));
        let head = RequestHead {
            method: Bytes::from_static(b"POST"),
            target: Bytes::from_static(b"/a%2Fb;c?x=1+2&&y="),
            scheme: Scheme::Https,
            authority: "a.test".into(),
            headers,
        };

        let request = request(&head).unwrap();

        assert_eq!(request.uri().to_string(), "https://a.test/a%2Fb;c?x=1+2&&y=");
        assert_eq!(request.headers().len(), 1);
    }

    #[test]
    fn cookie_crumbs_become_one_field() {
        let mut headers = Fields::new();
        headers.append("cookie", Bytes::from_static(b"a=1"));
        headers.append("x", Bytes::new());
        headers.append("cookie", Bytes::from_static(b"b=2"));

        join_cookies(&mut headers);

        assert_eq!(headers.all("cookie").collect::<Vec<_>>(), [&b"a=1; b=2"[..]]);
    }
}
