//! Frames cut, masked and split in every way, with and without a placeholder in them.

use super::*;

const TEXT: u8 = 0x1;
const CONTINUED: u8 = 0x0;
const PING: u8 = 0x9;
const FIN: u8 = 0x80;

fn frame(first: u8, payload: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    let flag = if mask.is_some() { 0x80 } else { 0 };
    let mut out = vec![first];
    match payload.len() {
        short @ 0..=125 => out.push(flag | short as u8),
        long @ 126..=0xffff => {
            out.push(flag | 126);
            out.extend((long as u16).to_be_bytes());
        }
        long => {
            out.push(flag | 127);
            out.extend((long as u64).to_be_bytes());
        }
    }
    let mask = mask.inspect(|mask| out.extend(mask)).unwrap_or_default();
    out.extend(payload.iter().enumerate().map(|(index, byte)| byte ^ mask[index % 4]));
    out
}

/// Sends the pieces; gives all that went on, the refusal, and the guard after it.
fn send(protocol: &[u8], pieces: &[&[u8]]) -> (Vec<u8>, Option<Refused>, Guard) {
    let mut guard = Guard::new(protocol);
    let mut out = Vec::new();
    for piece in pieces {
        if let Err(refused) = guard.check(piece) {
            return (out, Some(refused), guard);
        }
        out.extend_from_slice(piece);
    }
    (out, None, guard)
}

fn masked(first: u8, payload: &[u8]) -> Vec<u8> {
    frame(first, payload, Some([0x37, 0xfa, 0x21, 0x3d]))
}

/// A placeholder in whole or over fragments, with a ping in between.
fn messages_with_placeholder() -> Vec<Vec<u8>> {
    let text = b"{\"token\":\"pxd_PXDmark1abcdefghijkl\"}";
    let middle = text.windows(4).position(|w| w == b"mark").unwrap();
    let mut list = vec![
        masked(FIN | TEXT, text),
        frame(FIN | TEXT, text, None),
        masked(FIN | TEXT, &[&[b'x'; 300][..], text].concat()),
        masked(FIN | PING, b"PXDmark1"),
    ];
    for cut in [1, middle - 2, middle, middle + 3] {
        list.push(
            [
                masked(TEXT, &text[..cut]),
                masked(FIN | PING, b"still here"),
                masked(CONTINUED, b""),
                masked(FIN | CONTINUED, &text[cut..]),
            ]
            .concat(),
        );
    }
    list
}

#[test]
fn a_placeholder_is_refused_however_it_is_framed_masked_and_cut_into_pieces() {
    for bytes in messages_with_placeholder() {
        for step in [1, 2, 3, 7, 64, bytes.len()] {
            let pieces: Vec<&[u8]> = bytes.chunks(step).collect();

            let (out, refused, _) = send(b"websocket", &pieces);

            assert_eq!(refused, Some(Refused::Placeholder), "steps of {step}");
            assert!(bytes.starts_with(&out) && out.len() < bytes.len());
        }
    }
}

#[test]
fn every_other_frame_goes_on_as_it_came() {
    let big = vec![b'P'; 70_000];
    let messages = [
        masked(FIN | TEXT, b""),
        masked(FIN | TEXT, b"PXDmark0 PXPXDmark PXDmarP"),
        masked(FIN | 0x2, &big),
        frame(FIN | TEXT, b"no mask", None),
        // A beginning in one message and its end in another are no placeholder.
        [masked(FIN | TEXT, b"PXDm"), masked(FIN | TEXT, b"ark1")].concat(),
        [masked(TEXT, b"PXDm"), masked(FIN | PING, b"ark1"), masked(FIN | CONTINUED, b"x")]
            .concat(),
        masked(FIN | 0x8, &[0x03, 0xe8]),
    ];
    let all = messages.concat();
    for step in [1, 5, 1000, all.len()] {
        let pieces: Vec<&[u8]> = all.chunks(step).collect();

        let (out, refused, _) = send(b"WebSocket", &pieces);

        assert_eq!(refused, None);
        assert!(out == all, "steps of {step}");
    }
}

#[test]
fn compressed_frames_are_refused() {
    let compressed = masked(FIN | 0x40 | TEXT, b"\x01\x02");
    let (_, refused, _) = send(b"websocket", &[&compressed]);

    assert_eq!(refused, Some(Refused::Extension));
}

#[test]
fn other_protocols_are_searched_as_they_stand() {
    let (out, refused, _) = send(b"spdy/3.1", &[b"abc PXDm", b"ark1"]);
    let (all, none, _) = send(b"spdy/3.1", &[b"abc PXDm", b"arkets"]);

    assert_eq!((&out[..], refused), (&b"abc PXDm"[..], Some(Refused::Placeholder)));
    assert_eq!((&all[..], none), (&b"abc PXDmarkets"[..], None));
}

#[test]
fn the_upstream_is_told_only_between_two_frames() {
    let whole = masked(FIN | TEXT, b"PXDmark1");
    let (_, _, between) = send(b"websocket", &[&masked(FIN | TEXT, b"fine"), &whole]);
    let (_, _, within) = send(b"websocket", &[&whole[..8], &whole[8..]]);

    assert_eq!(between.farewell().unwrap()[..2], [0x88, 0x82]);
    assert!(within.farewell().is_none());
}

#[test]
fn a_handshake_is_checked_as_the_standards_example_is() {
    let accept = Bytes::from_static(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");

    assert!(is_answer_to(b"dGhlIHNhbXBsZSBub25jZQ==", Some(&accept)));
    assert!(!is_answer_to(b"dGhlIHNhbXBsZSBub25jZQ=a", Some(&accept)));
    assert!(!is_answer_to(b"dGhlIHNhbXBsZSBub25jZQ==", None));
    assert_eq!(random_key().unwrap().len(), 24);
}

#[test]
fn the_search_knows_the_mark() {
    let first = MARK.as_bytes()[0];

    assert!(!MARK.as_bytes()[1..].contains(&first), "the search would miss overlapping beginnings");
}
