//! The kept corpus of the fuzz targets, replayed: what once broke a parser does not break it again.

use proxyd::fuzzing;

/// Hands every kept input of a target to it.
fn replay(target: &str, check: fn(&[u8])) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus");
    let mut count = 0;
    for entry in std::fs::read_dir(folder.join(target)).unwrap() {
        let path = entry.unwrap().path();
        let input = std::fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| check(&input));
        assert!(outcome.is_ok(), "{} breaks {target}", path.display());
        count += 1;
    }
    assert!(count >= 10, "only {count} kept inputs for {target}");
}

macro_rules! targets {
    ($($test:ident: $target:ident;)*) => {
        $(#[test]
        fn $test() {
            replay(stringify!($target), fuzzing::$target);
        })*

        /// Each target of `tests/fuzz` is replayed here.
        #[test]
        fn no_target_is_left_out() {
            let replayed = [$(stringify!($target)),*];
            let manifest = include_str!("../../tests/fuzz/Cargo.toml");
            let listed: Vec<_> = manifest
                .lines()
                .filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
                .filter(|name| *name != "cleanhands-fuzz")
                .collect();
            assert_eq!(listed, replayed);
        }
    };
}

targets! {
    no_kept_client_hello_breaks_anything: client_hello;
    no_kept_request_breaks_anything: request_head;
    no_kept_dns_packet_breaks_anything: dns_packet;
    no_kept_answer_breaks_anything: response_head;
    no_kept_chunked_body_breaks_anything: chunked_body;
    no_kept_http2_head_breaks_anything: h2_head;
    no_kept_policy_file_breaks_anything: policy_file;
    no_kept_url_breaks_anything: url;
    no_kept_websocket_message_breaks_anything: websocket;
    no_kept_echo_breaks_anything: scrub;
}
