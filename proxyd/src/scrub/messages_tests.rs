//! An upstream's frames, with a value over one, over fragments and over messages, at every split.

use super::*;
use crate::scrub::{BodyScrubber, Patterns, forms};

const CANARY: &str = "SECRET-CANARY-7f3a9b";
const TEXT: u8 = 0x1;
const CONTINUED: u8 = 0x0;
const PING: u8 = 0x9;
const FIN: u8 = 0x80;

fn scrubber() -> BodyScrubber {
    BodyScrubber::switched(&Patterns::new(&forms(CANARY.as_bytes())), b"WebSocket")
}

fn frame(first: u8, payload: &str, mask: Option<[u8; 4]>) -> Vec<u8> {
    let flag = if mask.is_some() { 0x80 } else { 0 };
    let mut out = vec![first];
    match payload.len() {
        short @ 0..=125 => out.push(flag | u8::try_from(short).unwrap()),
        long => {
            out.push(flag | 126);
            out.extend(u16::try_from(long).unwrap().to_be_bytes());
        }
    }
    let mask = mask.inspect(|mask| out.extend(mask)).unwrap_or_default();
    out.extend(payload.bytes().enumerate().map(|(index, byte)| byte ^ mask[index % 4]));
    out
}

/// What comes out when the stream comes in these pieces, and how many values were masked.
fn through(pieces: &[&[u8]]) -> (Vec<u8>, u64) {
    let mut scrubber = scrubber();
    let mut out = Vec::new();
    for piece in pieces {
        out.extend(scrubber.push(Bytes::copy_from_slice(piece)).unwrap().concat());
    }
    let found = scrubber.masked();
    out.extend(scrubber.finish().unwrap().concat());
    (out, found)
}

fn stars(text: &str) -> String {
    text.replace(CANARY, &"*".repeat(CANARY.len()))
}

/// Streams with one value, and the same with its mask.
fn streams() -> Vec<(Vec<u8>, Vec<u8>)> {
    let whole = format!("{{\"echo\":\"{CANARY}\"}}");
    let long = format!("{}{whole}", "filler ".repeat(30));
    let key = Some([0x37, 0xfa, 0x21, 0x3d]);
    let mut list: Vec<(Vec<u8>, Vec<u8>)> = [
        (FIN | TEXT, &whole, None),
        (FIN | TEXT, &long, None),
        (FIN | PING, &whole, None),
        // No server masks, but a reader may undo it.
        (FIN | TEXT, &whole, key),
    ]
    .into_iter()
    .map(|(first, text, key)| (frame(first, text, key), frame(first, &stars(text), key)))
    .collect();
    let hidden = stars(&whole);
    for cut in [1, 10, 12, 20, whole.len() - 3] {
        for (first, second) in [(TEXT, FIN | CONTINUED), (FIN | TEXT, FIN | TEXT)] {
            let stream = |text: &str| {
                [
                    frame(first, &text[..cut], None),
                    frame(FIN | PING, "still here", None),
                    frame(second & !FIN, "", key),
                    frame(FIN | CONTINUED, &text[cut..], key),
                ]
                .concat()
            };
            list.push((stream(&whole), stream(&hidden)));
        }
    }
    list
}

#[test]
fn a_value_is_masked_over_fragments_and_messages_at_every_split() {
    for (stream, want) in streams() {
        for cut in 0..=stream.len() {
            let (out, found) = through(&[&stream[..cut], &stream[cut..]]);
            assert_eq!(String::from_utf8_lossy(&out), String::from_utf8_lossy(&want), "at {cut}");
            assert_eq!(found, 1);
        }
        for size in 1..9 {
            let pieces: Vec<&[u8]> = stream.chunks(size).collect();
            let (out, found) = through(&pieces);
            assert!(out == want && found == 1, "in pieces of {size}: {out:?}");
        }
    }
}

#[test]
fn an_upstreams_compressed_frame_ends_the_connection() {
    let mut scrubber = scrubber();
    let fine = scrubber.push(frame(FIN | TEXT, "fine", None).into());
    let compressed = scrubber.push(frame(FIN | 0x40 | TEXT, "odd", None).into());

    assert!(fine.is_ok());
    assert_eq!(compressed, Err(ScrubError::Extension));
}

#[test]
fn nothing_of_other_messages_waits() {
    let mut scrubber = scrubber();
    let binary = "x\u{1}y".repeat(50);
    for message in [frame(FIN | TEXT, "no value!", None), frame(FIN | 0x2, &binary, None)] {
        let chunk = Bytes::from(message);

        let out = scrubber.push(chunk.clone()).unwrap();

        assert_eq!(out, vec![chunk]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_whole_message_does_not_wait_for_another_and_what_follows_is_masked() {
    let mut scrubber = scrubber();
    let first = frame(FIN | TEXT, &CANARY[..9], None);
    let held = scrubber.push(first.clone().into()).unwrap();
    scrubber.lull().await;
    let after = scrubber.let_go();
    let second = scrubber.push(frame(FIN | TEXT, &CANARY[9..], None).into()).unwrap();

    assert_eq!([held.concat(), after.concat()].concat(), first);
    assert_eq!(second.concat(), frame(FIN | TEXT, "***********", None));
    assert_eq!(scrubber.masked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_is_not_whole_lets_go_no_more_of_a_value_than_any_stream() {
    let mut scrubber = scrubber();
    let held = scrubber.push(frame(TEXT, &CANARY[..9], None).into()).unwrap();

    assert_eq!(held.concat(), [TEXT, 9]);
    assert!(scrubber.let_go().is_empty());
}

#[test]
fn other_protocols_are_searched_as_they_stand() {
    let patterns = Patterns::new(&forms(CANARY.as_bytes()));
    let mut scrubber = BodyScrubber::switched(&patterns, b"spdy/3.1");

    let out = scrubber.push(Bytes::from(format!("\u{1}\u{7f}{CANARY}."))).unwrap();

    assert_eq!(out.concat(), format!("\u{1}\u{7f}{}.", "*".repeat(20)).as_bytes());
}
