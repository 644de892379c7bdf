//! DNS messages (RFC 1035 section 4), as much as a sandbox's questions need: one question in,
//! one answer out. Every length is checked; a name is at most 255 bytes and has no pointers.

use std::net::IpAddr;

const HEADER_BYTES: usize = 12;
const NAME_BYTES_MAX: usize = 255;
/// Short: an address stands for a name as long as the lease lives, but a client that starts
/// later must not find another lease's cached one.
const TTL_SECONDS: u32 = 60;

const RCODE_FORMAT: u8 = 1;
const RCODE_NOT_IMPLEMENTED: u8 = 4;
const RCODE_REFUSED: u8 = 5;

/// One question.
#[derive(Debug)]
pub struct Question {
    id: u16,
    recursion_desired: bool,
    /// Without the last dot.
    pub name: String,
    pub kind: u16,
    pub class: u16,
    /// The question as it stands in the packet: the answer repeats it, letter case and all.
    raw: Vec<u8>,
}

#[cfg(test)]
impl Question {
    pub fn for_test(name: &str, kind: u16) -> Self {
        Self {
            id: 0,
            recursion_desired: true,
            name: name.to_owned(),
            kind,
            class: 1,
            raw: Vec::new(),
        }
    }
}

/// Why a packet is no question to answer.
#[derive(Debug)]
pub enum ParseError {
    /// Too short to be answered, or an answer itself: replying could start a loop.
    Ignore,
    /// Answer with this.
    Reply(Vec<u8>),
}

/// What to say about a name.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    Address(IpAddr),
    NoRecord,
    Refused,
}

/// Reads one question.
pub fn parse(packet: &[u8]) -> Result<Question, ParseError> {
    let Some(header) = packet.first_chunk::<HEADER_BYTES>() else {
        return Err(ParseError::Ignore);
    };
    let id = u16::from_be_bytes([header[0], header[1]]);
    if header[2] & 0x80 != 0 {
        return Err(ParseError::Ignore);
    }
    let recursion_desired = header[2] & 1 != 0;
    let error = |rcode| ParseError::Reply(reply_header(id, recursion_desired, rcode, 0, 0));
    if header[2] & 0x78 != 0 {
        return Err(error(RCODE_NOT_IMPLEMENTED));
    }
    let questions = u16::from_be_bytes([header[4], header[5]]);
    if questions != 1 {
        return Err(error(RCODE_FORMAT));
    }
    let body = &packet[HEADER_BYTES..];
    let Some((name, length)) = name(body) else { return Err(error(RCODE_FORMAT)) };
    let Some(rest) = body.get(length..length + 4) else { return Err(error(RCODE_FORMAT)) };
    Ok(Question {
        id,
        recursion_desired,
        name,
        kind: u16::from_be_bytes([rest[0], rest[1]]),
        class: u16::from_be_bytes([rest[2], rest[3]]),
        raw: body[..length + 4].to_vec(),
    })
}

/// The name at the start of `bytes` and its length there. Bytes that a host name cannot hold
/// become characters that no host name is made of.
fn name(bytes: &[u8]) -> Option<(String, usize)> {
    let mut text = String::new();
    let mut at = 0;
    loop {
        let length = usize::from(*bytes.get(at)?);
        at += 1;
        if length == 0 {
            return Some((text, at));
        }
        // Two high bits set is a pointer; a question has nothing to point back to.
        if length > 63 || at + length > NAME_BYTES_MAX {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        for byte in bytes.get(at..at + length)? {
            let legal = byte.is_ascii_alphanumeric() || *byte == b'-' || *byte == b'_';
            text.push(if legal { char::from(*byte) } else { '\u{fffd}' });
        }
        at += length;
    }
}

fn reply_header(id: u16, recursion: bool, rcode: u8, questions: u16, answers: u16) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    bytes.extend_from_slice(&id.to_be_bytes());
    bytes.extend_from_slice(&[0x80 | u8::from(recursion), 0x80 | rcode]);
    for count in [questions, answers, 0, 0] {
        bytes.extend_from_slice(&count.to_be_bytes());
    }
    bytes
}

/// Writes the answer to a question.
pub fn reply(question: &Question, answer: Answer) -> Vec<u8> {
    let (rcode, answers) = match answer {
        Answer::Address(_) => (0, 1),
        Answer::NoRecord => (0, 0),
        Answer::Refused => (RCODE_REFUSED, 0),
    };
    let mut bytes = reply_header(question.id, question.recursion_desired, rcode, 1, answers);
    bytes.extend_from_slice(&question.raw);
    if let Answer::Address(ip) = answer {
        // A pointer to the name in the question.
        bytes.extend_from_slice(&[0xc0, HEADER_BYTES as u8]);
        bytes.extend_from_slice(&question.kind.to_be_bytes());
        bytes.extend_from_slice(&question.class.to_be_bytes());
        bytes.extend_from_slice(&TTL_SECONDS.to_be_bytes());
        match ip {
            IpAddr::V4(v4) => {
                bytes.extend_from_slice(&4u16.to_be_bytes());
                bytes.extend_from_slice(&v4.octets());
            }
            IpAddr::V6(v6) => {
                bytes.extend_from_slice(&16u16.to_be_bytes());
                bytes.extend_from_slice(&v6.octets());
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(name: &[u8], tail: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(tail);
        bytes
    }

    #[test]
    fn a_question_is_read_and_repeated_in_its_answer() {
        let packet = packet(b"\x03aPi\x04test\x00", &[0, 1, 0, 1]);
        let question = parse(&packet).unwrap();

        let answer = reply(&question, Answer::Address("198.18.0.1".parse().unwrap()));

        assert_eq!((question.name.as_str(), question.kind), ("aPi.test", 1));
        assert_eq!(&answer[..4], [0x12, 0x34, 0x81, 0x80]);
        assert_eq!(&answer[12..packet.len()], &packet[12..]);
        assert_eq!(&answer[answer.len() - 4..], [198, 18, 0, 1]);
    }

    #[test]
    fn no_packet_of_any_shape_panics() {
        let whole = packet(b"\x03abc\x04test\x00", &[0, 1, 0, 1]);
        for length in 0..whole.len() {
            assert!(parse(&whole[..length]).is_err(), "{length} bytes were a question");
        }
        for bad in [&b"\xc0\x0c"[..], b"\x40aaa", b"\x3fa", &[1; 300]] {
            assert!(parse(&packet(bad, &[0, 1, 0, 1])).is_err());
        }
    }

    #[test]
    fn answers_are_not_answered() {
        let mut packet = packet(b"\x01a\x00", &[0, 1, 0, 1]);
        packet[2] |= 0x80;

        assert!(matches!(parse(&packet), Err(ParseError::Ignore)));
    }

    #[test]
    fn a_dot_inside_a_label_is_no_separator() {
        let question = parse(&packet(b"\x08a.b.test\x00", &[0, 1, 0, 1])).unwrap();

        assert!(!question.name.contains('.'));
    }
}
