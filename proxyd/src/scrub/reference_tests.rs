//! The search held against the reference: texts made of forms of a value and of what confuses.

use super::*;

/// Numbers that are the same in each run (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap()
    }
}

const VALUES: &[&str] = &[
    "SECRET-CANARY-7f3a9b",
    "AbCd1234",
    "a b:c%41&amp;=3D\\n-and+more",
    "25252525252525aAaAaAaA",
    "ünïcode \n lines",
];

const NOISE: &[&str] = &[
    "%",
    "%2",
    "%25",
    "\\",
    "\\\\",
    "\\u00",
    "&",
    "&amp;",
    "&#",
    "=",
    "=\r\n",
    "=3",
    "\n",
    "\r\n",
    " ",
    ":",
    "\0",
    "\n\n",
    "                 ",
    "S",
    "SECRET-",
    "secret",
    "U0V",
    "4142",
    "plain",
    "text with words",
    "*",
    "ü",
    "\\u00fc",
    "&#x41",
    "a",
    "A",
    "1",
    "12",
    "3D",
];

/// One byte in one of the ways in which an encoder may write it.
fn written(numbers: &mut Numbers, byte: u8) -> Vec<u8> {
    let text = match numbers.below(12) {
        0 => format!("%{byte:02x}"),
        1 => format!("%25{byte:02X}"),
        2 if byte.is_ascii() => format!("\\u{byte:04x}"),
        3 => format!("\\x{byte:02x}"),
        4 if byte.is_ascii() => format!("&#{byte};"),
        5 => format!("={byte:02X}"),
        6 => return vec![byte, 0],
        7 => return vec![byte.to_ascii_uppercase()],
        8 => return vec![byte.to_ascii_lowercase(), b'\n'],
        9 if byte.is_ascii() => format!("\\u0026#{byte};"),
        _ => return vec![byte],
    };
    text.into_bytes()
}

fn text(numbers: &mut Numbers, value: &[u8]) -> Vec<u8> {
    let forms = forms(value);
    let mut text = Vec::new();
    for _ in 0..1 + numbers.below(8) {
        if numbers.below(3) > 0 {
            text.extend_from_slice(NOISE[numbers.below(NOISE.len())].as_bytes());
            continue;
        }
        let form = forms[numbers.below(forms.len())].expose_secret();
        let form = if numbers.below(2) == 0 { value } else { form };
        let (from, to) = match numbers.below(4) {
            0 => (0, numbers.below(form.len() + 1)),
            1 => (numbers.below(form.len()), form.len()),
            _ => (0, form.len()),
        };
        let odd = numbers.below(2) == 0;
        for byte in &form[from..to] {
            match odd {
                true => text.extend(written(numbers, *byte)),
                false => text.push(*byte),
            }
        }
    }
    text
}

#[test]
fn the_search_masks_what_the_reference_says_and_nothing_else_at_any_splits() {
    let mut numbers = Numbers(1);
    for value in VALUES {
        let value = value.as_bytes();
        let patterns = patterns(value);
        for _ in 0..400 {
            let text = text(&mut numbers, value);
            let hidden = hidden(value, &text);
            let mut cuts: Vec<usize> =
                (0..numbers.below(6)).map(|_| numbers.below(text.len() + 1)).collect();
            cuts.sort_unstable();

            let masked = masked(&patterns, &text, &cuts);

            let shown = String::from_utf8_lossy(&text);
            assert!(masked == hidden, "{shown:?} cut at {cuts:?}:\n{masked:?}\n{hidden:?}");
        }
    }
}

#[test]
fn the_reference_says_what_it_should() {
    let hidden = |value: &str, text: &str| -> String {
        let hidden = hidden(value.as_bytes(), text.as_bytes());
        text.chars().zip(hidden).map(|(c, hidden)| if hidden { '#' } else { c }).collect()
    };
    for (text, want) in [
        ("x-abCDefghij.", "x-##########."),
        ("x-abc%64efgh+", "x-##########+"),
        ("x-abcdefg+", "x-abcdefg+"),
        ("ab\ncdef\nghij", "############"),
        ("ab\n\ncdefghij", "ab\n\ncdefghij"),
    ] {
        assert_eq!(hidden("abcdefghij", text), want);
    }
}
