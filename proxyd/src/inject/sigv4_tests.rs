//! Signatures against those that AWS publishes for its examples, and what is refused.

use super::super::chunks::Chunks;
use super::super::{head, lines};
use super::*;
use crate::lease::share::{Share, Shares};
use crate::relay::body::ReadError;

const NOW: &str = "2013-05-24T00:00:00Z";

fn key_of(secret: &str, date: &str, region: &str, service: &str) -> Vec<u8> {
    let mac = |key: &[u8], text: &str| hex::decode(hex_mac(key, text.as_bytes())).unwrap();
    [date, region, service, "aws4_request"]
        .iter()
        .fold(format!("AWS4{secret}").into_bytes(), |key, text| mac(&key, text))
}

fn now(text: &str) -> jiff::Timestamp {
    text.parse().unwrap()
}

/// What goes on for a request that carries that field or query, signed with the example's key.
fn signed(
    (target, headers): (&str, &[(&str, &str)]),
    at: &str,
    body: &[u8],
    session: &str,
) -> Vec<String> {
    let (secret, id) = match at {
        NOW => ("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AKIAIOSFODNN7EXAMPLE"),
        _ => ("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "AKIDEXAMPLE"),
    };
    let mut head = head(target, headers);
    if !body.is_empty() {
        head.method = Bytes::from_static(b"POST");
    }
    let asked = read(&head, now(at)).unwrap().unwrap();
    let date = at[..10].replace('-', "");
    let signing = key_of(secret, &date, &asked.region, &asked.service);
    let key = Key { signing: &signing, id: id.as_bytes(), session: session.as_bytes() };
    sign(&mut head, &asked, &key, Some(body), now(at));
    lines(&head)
}

fn scope(service: &str) -> String {
    format!(
        "AWS4-HMAC-SHA256 Credential=AKIAplaceholder/20200101/us-east-1/{service}/aws4_request, \
         SignedHeaders=host, Signature=00"
    )
}

#[test]
fn signs_as_the_published_examples_do() {
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let s3 = scope("s3");
    let other = scope("service");
    let host = ("Host", "examplebucket.s3.amazonaws.com");
    let plain = ("Host", "example.amazonaws.com");
    let later = "2015-08-30T12:36:00Z";
    let objects = [host, ("x-amz-content-sha256", empty), ("Authorization", &s3[..])];
    let vanilla = [plain, ("Authorization", &other[..])];
    for (target, headers, at, signature) in [
        (
            "/?lifecycle",
            &objects[..],
            NOW,
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "/?prefix=J&max-keys=2",
            &objects[..],
            NOW,
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
        (
            "/",
            &vanilla[..],
            later,
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
        ),
    ] {
        let lines = signed((target, headers), at, b"", "");

        let last = lines.last().unwrap();
        assert!(last.ends_with(&format!("Signature={signature}")), "{target}: {lines:#?}");
        assert_eq!(lines[0], target);
    }
}

/// What AWS's own client signs for the same bytes.
#[test]
fn names_with_odd_characters_are_signed_as_the_service_reads_them() {
    let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let host = ("Host", "examplebucket.s3.amazonaws.com");
    let (s3, other) = (scope("s3"), scope("service"));
    let object = [host, ("x-amz-content-sha256", empty), ("Authorization", &s3[..])];
    for (target, headers, signature) in [
        (
            "/large/%C3%BC%2B%26%20%28x%29~.bin?list-type=2&prefix=a%2Fb%20c&delimiter=",
            &object[..],
            "cd96564f7839e4da487282a3b27be23a515c69d612df44ced24fc6e7443d9144",
        ),
        (
            "/a//b/../c%20d/./e%2Ff/?x=1",
            &[host, ("Authorization", &other[..])],
            "55b59fd2eb783d4fb504d21c8a6d4c25f281f66a3dc0d2c785399a9a2e6c9945",
        ),
    ] {
        let lines = signed((target, headers), NOW, b"", "");

        assert!(lines.last().unwrap().ends_with(signature), "{target}: {lines:#?}");
    }
}

#[test]
fn a_presigned_address_is_signed_as_the_published_example() {
    let target = "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=\
                  AKIAplaceholder%2F20130524%2Fus-east-1%2Fs3%2Faws4_request\
                  &X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host\
                  &X-Amz-Signature=00";
    let host = [("Host", "examplebucket.s3.amazonaws.com")];

    let lines = signed((target, &host), NOW, b"", "");

    let expected = "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=\
                    AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request\
                    &X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host\
                    &X-Amz-Signature=\
                    aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404";
    assert_eq!(lines[0], expected);
}

#[test]
fn a_form_that_says_no_hash_is_signed_over_its_bytes_and_a_session_goes_along() {
    let headers = [
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Host", "example.amazonaws.com"),
        ("X-Amz-Security-Token", "the sandbox's"),
        ("Authorization", &scope("service")[..]),
    ];
    let at = "2015-08-30T12:36:00Z";

    let without = signed(("/", &headers), at, b"Param1=value1", "");
    let with = signed(("/", &headers), at, b"Param1=value1", "SESSION-CANARY");

    let signature = "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a";
    assert!(without.last().unwrap().ends_with(signature), "{without:#?}");
    assert!(with.contains(&"X-Amz-Security-Token: SESSION-CANARY".to_owned()), "{with:#?}");
    assert!(with.last().unwrap().contains("x-amz-security-token,"), "{with:#?}");
}

#[test]
fn requests_that_cannot_be_signed_again_say_why() {
    let presigned = |date: &str, life: &str| {
        format!(
            "/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=a/b/c/d/aws4_request\
             &X-Amz-Date={date}&X-Amz-Expires={life}&X-Amz-Signature=0"
        )
    };
    let good = scope("s3");
    for (target, field, reason) in [
        ("/".into(), "AWS4-ECDSA-P256-SHA256 Credential=a/b/c/aws4_request", "version 4 with HMAC"),
        ("/".into(), "Bearer x", "version 4 with HMAC"),
        ("/".into(), "AWS4-HMAC-SHA256 Signature=0", "names no scope"),
        ("/".into(), "AWS4-HMAC-SHA256 Credential=a/b, Signature=0", "scope of its signature"),
        (presigned("20130524T000000Z", "60"), &good[..], "more than once"),
        (presigned("20130523T235859Z", "60"), "", "has expired"),
        (presigned("20130524T010000Z", "60"), "", "a time to come"),
        (presigned("20130524T000000Z", "0"), "", "how long it lasts"),
        (presigned("yesterday", "60"), "", "how long it lasts"),
    ] {
        let headers = [("Authorization", field)];
        let headers = if field.is_empty() { &[][..] } else { &headers[..] };
        let head = head(&target, headers);

        let found = read(&head, now(NOW)).err().unwrap_or_default();

        assert!(found.contains(reason), "{target} {field}: {found}");
    }
    assert!(read(&head("/?a=b", &[]), now(NOW)).unwrap().is_none());
}

/// The published upload in chunks: 65 KiB of `a` in pieces of 64 KiB.
#[test]
fn chunks_are_signed_again_at_equal_length_however_they_arrive() {
    let secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
    let seed = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9";
    let zeros = "0".repeat(64);
    let chunk = |size: usize, signature: &str| {
        format!("{size:x};chunk-signature={signature}\r\n{}\r\n", "a".repeat(size))
    };
    let sent = [65536, 1024, 0].map(|size| chunk(size, &zeros)).concat();
    let expected = [
        (65536, "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648"),
        (1024, "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497"),
        (0, "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9"),
    ];
    let expected = expected.map(|(size, signature)| chunk(size, signature)).concat();
    for piece in [1, 7, 4096, 100_000] {
        let mut chunks = chunks(secret, seed, false);
        let mut out = Vec::new();
        for part in sent.as_bytes().chunks(piece) {
            for part in chunks.push(&Bytes::copy_from_slice(part)).unwrap() {
                out.extend_from_slice(&part);
            }
        }
        assert!(chunks.finish().is_ok());
        assert!(out == expected.as_bytes(), "in pieces of {piece}");
    }
}

fn chunks(secret: &str, seed: &str, trailer: bool) -> Chunks {
    chunks_in(&Shares::here().held(), secret, seed, trailer)
}

fn chunks_in(room: &Share, secret: &str, seed: &str, trailer: bool) -> Chunks {
    let signing = Secret::new(key_of(secret, "20130524", "us-east-1", "s3"));
    let scope = "20130524/us-east-1/s3/aws4_request".to_owned();
    let (stamp, last) = ("20130524T000000Z".to_owned(), seed.to_owned());
    let signer = Signer { key: signing, stamp, scope, last, trailer };
    Chunks::new(signer, room.take(0).unwrap())
}

#[test]
fn a_signed_trailer_keeps_its_length_and_broken_chunks_go_no_further() {
    let zeros = "0".repeat(64);
    let line = |size: &str| format!("{size};chunk-signature={zeros}\r\n");
    let trailer =
        format!("x-amz-checksum-crc32c:sOO8/Q==\r\nx-amz-trailer-signature:{zeros}\r\n\r\n");
    let whole = format!("{}abc\r\n{}{trailer}", line("3"), line("0"));
    let mut good = chunks("SECRET", "seed", true);
    let out = good.push(&Bytes::from(whole.clone())).unwrap().concat();
    assert!(good.finish().is_ok());
    assert_eq!(out.len(), whole.len());
    assert!(!String::from_utf8(out).unwrap().contains(&zeros));

    for broken in [
        "zz;chunk-signature=0\r\n".to_owned(),
        "3\r\nabc\r\n".into(),
        format!("{}abcd\r\n", line("3")),
        line("fffffff"),
        format!("{}\r\nmore", line("0")),
        "x".repeat(600),
    ] {
        let mut chunks = chunks("SECRET", "seed", false);
        assert!(chunks.push(&Bytes::from(broken.clone())).is_err(), "{broken}");
    }
    let mut short = chunks("SECRET", "seed", false);
    short.push(&Bytes::from(line("3"))).unwrap();
    assert!(short.finish().is_err());
}

#[test]
fn what_is_held_back_of_chunks_is_of_the_leases_share_and_given_back_with_the_body() {
    const HELD_BYTES_MAX: usize = 32 << 20;
    let room = Shares::here().held();
    let _elsewhere = room.take(HELD_BYTES_MAX - 5000).unwrap();
    let line = Bytes::from(format!("2000;chunk-signature={}\r\n", "0".repeat(64)));
    let part = |length: usize| Bytes::from(vec![b'a'; length]);
    let mut one = chunks_in(&room, "SECRET", "seed", false);
    let mut two = chunks_in(&room, "SECRET", "seed", false);
    one.push(&line).unwrap();
    two.push(&line).unwrap();

    // Neither chunk is whole, and both together are more than there is.
    assert!(one.push(&part(3000)).unwrap().is_empty());
    assert!(matches!(two.push(&part(3000)), Err(ReadError::Busy(_))));
    assert!(room.take(3000).is_err());
    drop(one);
    assert!(two.push(&part(3000)).is_ok());
    drop(two);
    assert!(room.take(5000).is_ok());
}
