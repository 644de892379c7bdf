//! DNS messages (RFC 1035 section 4), as much as a sandbox's questions need: one question in,
//! one answer out. Every length is checked; a name is at most 255 bytes and has no pointers.
//! Extended DNS (RFC 6891) is answered in kind; no answer is longer than 512 bytes, so none is ever
//! cut.

use std::net::IpAddr;

const HEADER_BYTES: usize = 12;
const NAME_BYTES_MAX: usize = 255;
/// Short: an address stands for a name as long as the lease lives, but a client that starts
/// later must not find another lease's cached one.
const TTL_SECONDS: u32 = 60;

const RCODE_FORMAT: u8 = 1;
const RCODE_NO_NAME: u8 = 3;
const RCODE_NOT_IMPLEMENTED: u8 = 4;
const RCODE_REFUSED: u8 = 5;
/// Sixteen: its higher bits stand in the OPT record (RFC 6891 section 6.1.3).
const RCODE_BAD_VERSION_HIGH: u8 = 1;

const TYPE_OPT: u16 = 41;
/// The longest datagram that we say we take; longer than any question.
const PAYLOAD_BYTES: u16 = 1232;
/// Records behind a question: an OPT record, at most a signature. More is no resolver's question.
const RECORDS_MAX: u16 = 8;

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
    extended: Option<Extended>,
}

/// The OPT record of a question.
#[derive(Clone, Copy, Debug)]
struct Extended {
    version: u8,
    /// The bit that asks for signatures; it is given back (RFC 3225 section 3).
    signed: bool,
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
            extended: None,
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
    /// There is no such name. Of all refusals this is the one that every resolver passes on at
    /// once: some take "refused" for a sick server and wait for another to answer.
    NoName,
    /// Not a question about Internet names at all.
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
    let error = |rcode| ParseError::Reply(reply_header(id, recursion_desired, rcode, [0; 3]));
    if header[2] & 0x78 != 0 {
        return Err(error(RCODE_NOT_IMPLEMENTED));
    }
    let [questions, answers, authorities, additional] =
        [4, 6, 8, 10].map(|at| u16::from_be_bytes([header[at], header[at + 1]]));
    // Answers in a question are somebody's attempt at something.
    if questions != 1 || answers != 0 || authorities != 0 || additional > RECORDS_MAX {
        return Err(error(RCODE_FORMAT));
    }
    let body = &packet[HEADER_BYTES..];
    let Some((name, length)) = name(body) else { return Err(error(RCODE_FORMAT)) };
    let Some(rest) = body.get(length..length + 4) else { return Err(error(RCODE_FORMAT)) };
    let Some(extended) = extended(&body[length + 4..], additional) else {
        return Err(error(RCODE_FORMAT));
    };
    let question = Question {
        id,
        recursion_desired,
        name,
        kind: u16::from_be_bytes([rest[0], rest[1]]),
        class: u16::from_be_bytes([rest[2], rest[3]]),
        raw: body[..length + 4].to_vec(),
        extended,
    };
    if extended.is_some_and(|extended| extended.version > 0) {
        return Err(ParseError::Reply(question.head(0, 0, RCODE_BAD_VERSION_HIGH)));
    }
    Ok(question)
}

/// What to say to a packet that was longer than any question, of which only the start is there.
pub fn too_long(start: &[u8]) -> Option<Vec<u8>> {
    let header = start.first_chunk::<HEADER_BYTES>()?;
    let id = u16::from_be_bytes([header[0], header[1]]);
    let answer = header[2] & 0x80 != 0;
    (!answer).then(|| reply_header(id, header[2] & 1 != 0, RCODE_FORMAT, [0; 3]))
}

/// The OPT record among the records behind the question, if there is one; nothing at all if the
/// records are not sound. A second one is forbidden (RFC 6891 section 6.1.1).
fn extended(mut bytes: &[u8], count: u16) -> Option<Option<Extended>> {
    let mut found = None;
    for _ in 0..count {
        let owner = name_bytes(bytes)?;
        let (fields, rest) = bytes[owner..].split_at_checked(10)?;
        let length = usize::from(u16::from_be_bytes([fields[8], fields[9]]));
        bytes = rest.get(length..)?;
        if u16::from_be_bytes([fields[0], fields[1]]) != TYPE_OPT {
            continue;
        }
        if owner != 1 || found.is_some() {
            return None;
        }
        found = Some(Extended { version: fields[5], signed: fields[6] & 0x80 != 0 });
    }
    Some(found)
}

/// The length of a name that is passed over, pointers allowed.
fn name_bytes(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        match usize::from(*bytes.get(at)?) {
            0 => return Some(at + 1),
            length @ 1..=63 => at += 1 + length,
            pointer if pointer >= 0xc0 => return (at + 2 <= bytes.len()).then_some(at + 2),
            _ => return None,
        }
        if at > NAME_BYTES_MAX {
            return None;
        }
    }
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

/// A header; `counts` are those of questions, answers and additional records.
fn reply_header(id: u16, recursion: bool, rcode: u8, counts: [u16; 3]) -> Vec<u8> {
    let [questions, answers, additional] = counts;
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    bytes.extend_from_slice(&id.to_be_bytes());
    bytes.extend_from_slice(&[0x80 | u8::from(recursion), 0x80 | rcode]);
    for count in [questions, answers, 0, additional] {
        bytes.extend_from_slice(&count.to_be_bytes());
    }
    bytes
}

impl Question {
    /// The question as it stands in the packet, behind the header.
    pub fn bytes(&self) -> &[u8] {
        &self.raw
    }

    /// The answer up to its records, for one without any: header, question, OPT record.
    fn head(&self, rcode: u8, answers: u16, rcode_high: u8) -> Vec<u8> {
        let counts = [1, answers, u16::from(self.extended.is_some())];
        let mut bytes = reply_header(self.id, self.recursion_desired, rcode, counts);
        bytes.extend_from_slice(&self.raw);
        if answers == 0 {
            self.extend(&mut bytes, rcode_high);
        }
        bytes
    }

    /// The OPT record of the answer to a question that had one.
    fn extend(&self, bytes: &mut Vec<u8>, rcode_high: u8) {
        let Some(extended) = self.extended else { return };
        bytes.push(0);
        bytes.extend_from_slice(&TYPE_OPT.to_be_bytes());
        bytes.extend_from_slice(&PAYLOAD_BYTES.to_be_bytes());
        bytes.extend_from_slice(&[rcode_high, 0, u8::from(extended.signed) << 7, 0, 0, 0]);
    }
}

/// Writes the answer to a question.
pub fn reply(question: &Question, answer: Answer) -> Vec<u8> {
    let (rcode, answers) = match answer {
        Answer::Address(_) => (0, 1),
        Answer::NoRecord => (0, 0),
        Answer::NoName => (RCODE_NO_NAME, 0),
        Answer::Refused => (RCODE_REFUSED, 0),
    };
    let mut bytes = question.head(rcode, answers, 0);
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
        question.extend(&mut bytes, 0);
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

    const QUESTION: &[u8] = b"\x03api\x04test\x00\x00\x01\x00\x01";
    const OPT: &[u8] = &[0, 0, 41, 4, 208, 0, 0, 0x80, 0, 0, 4, 0, 10, 0, 0];

    /// A question with records behind it.
    fn extended_packet(records: &[&[u8]]) -> Vec<u8> {
        let mut bytes = packet(QUESTION, &records.concat());
        bytes[11] = u8::try_from(records.len()).unwrap();
        bytes
    }

    #[test]
    fn extended_questions_are_answered_in_kind() {
        for (records, extended) in [(&[][..], false), (&[OPT][..], true)] {
            let question = parse(&extended_packet(records)).unwrap();
            for answer in [Answer::NoRecord, Answer::Address("198.18.0.1".parse().unwrap())] {
                let reply = reply(&question, answer);

                let opt = [0, 0, 41, 4, 208, 0, 0, 0x80, 0, 0, 0];
                assert_eq!(reply.ends_with(&opt), extended, "{reply:?}");
                assert_eq!(reply[11], u8::from(extended));
            }
        }
        let mut newer = OPT.to_vec();
        newer[6] = 1;
        let Err(ParseError::Reply(reply)) = parse(&extended_packet(&[&newer])) else { panic!() };
        assert_eq!((reply[3] & 15, reply[reply.len() - 6]), (0, 1));
    }

    #[test]
    fn records_that_no_resolver_sends_are_a_format_error() {
        let elsewhere = [&b"\x01a"[..], OPT].concat();
        let cut = &OPT[..OPT.len() - 1];
        let signature = [&b"\xc0\x0c"[..], &[0, 250, 0, 255, 0, 0, 0, 0, 0, 1, 7]].concat();

        assert!(parse(&extended_packet(&[&signature, OPT])).is_ok());
        for records in [&[OPT, OPT][..], &[&elsewhere], &[cut], &[&[0xff][..]], &[&[][..]]] {
            let outcome = parse(&extended_packet(records));
            let Err(ParseError::Reply(reply)) = outcome else { panic!("{outcome:?}") };
            assert_eq!(reply[3] & 15, RCODE_FORMAT, "{records:?}");
        }
        for count_at in [5, 7, 9] {
            let mut bytes = packet(QUESTION, &[]);
            bytes[count_at] = 2;
            assert!(matches!(parse(&bytes), Err(ParseError::Reply(_))), "{count_at}");
        }
    }

    #[test]
    fn answers_are_not_answered() {
        let mut packet = packet(b"\x01a\x00", &[0, 1, 0, 1]);
        packet[2] |= 0x80;

        assert!(matches!(parse(&packet), Err(ParseError::Ignore)));
        assert!(too_long(&packet).is_none());
        packet[2] &= 0x7f;
        assert_eq!(too_long(&packet).unwrap()[3] & 15, RCODE_FORMAT);
    }

    #[test]
    fn a_dot_inside_a_label_is_no_separator() {
        let question = parse(&packet(b"\x08a.b.test\x00", &[0, 1, 0, 1])).unwrap();

        assert!(!question.name.contains('.'));
    }
}
