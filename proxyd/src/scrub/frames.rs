//! Cuts a stream into the frames of WebSocket (RFC 6455 section 5.2), without holding any.

/// Longest head of a frame.
const HEAD_BYTES_MAX: usize = 14;

/// Where a stream stands in its frames.
#[derive(Default)]
pub struct Frames {
    head: [u8; HEAD_BYTES_MAX],
    have: usize,
    /// The frame whose payload is under way, how much of it came and how much is left.
    current: Option<(FrameHead, usize, u64)>,
}

#[derive(Clone, Copy)]
pub struct FrameHead {
    pub opcode: u8,
    pub control: bool,
    /// Whether it is the last frame of its message.
    pub last: bool,
    /// Whether bits are set that only an extension gives a meaning.
    pub reserved: bool,
    pub mask: [u8; 4],
}

/// One part of a stream of frames.
pub enum Part {
    /// Bytes of a head that is not complete.
    Head,
    /// A head is complete.
    Begun(FrameHead),
    /// Payload, beginning at `offset` (of which only the last two bits matter).
    Payload { head: FrameHead, offset: usize },
}

impl Frames {
    /// The first part of `bytes`, which are not empty, and its length.
    pub fn next(&mut self, bytes: &[u8]) -> (usize, Part) {
        if let Some((head, offset, left)) = self.current {
            let length = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let left = left - length as u64;
            let next = (head, (offset + length) % 4, left);
            self.current = (left > 0).then_some(next);
            return (length, Part::Payload { head, offset });
        }
        for (index, byte) in bytes.iter().enumerate() {
            self.head[self.have] = *byte;
            self.have += 1;
            if self.have >= 2 && self.have == self.head_length() {
                let (head, length) = self.parse();
                self.have = 0;
                self.current = (length > 0).then_some((head, 0, length));
                return (index + 1, Part::Begun(head));
            }
        }
        (bytes.len(), Part::Head)
    }

    fn head_length(&self) -> usize {
        let mask = if self.head[1] & 0x80 == 0 { 0 } else { 4 };
        mask + match self.head[1] & 0x7f {
            126 => 4,
            127 => 10,
            _ => 2,
        }
    }

    fn parse(&self) -> (FrameHead, u64) {
        let wide = match self.head[1] & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let length = match wide {
            0 => u64::from(self.head[1] & 0x7f),
            _ => self.head[2..2 + wide].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
        };
        let mut mask = [0; 4];
        if self.head[1] & 0x80 != 0 {
            mask.copy_from_slice(&self.head[2 + wide..6 + wide]);
        }
        let opcode = self.head[0] & 0x0f;
        let head = FrameHead {
            opcode,
            control: opcode & 0x08 != 0,
            last: self.head[0] & 0x80 != 0,
            reserved: self.head[0] & 0x70 != 0,
            mask,
        };
        (head, length)
    }

    /// Whether the stream stands between two frames.
    pub fn is_between(&self) -> bool {
        self.have == 0 && self.current.is_none()
    }
}
