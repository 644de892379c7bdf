//! The nftables batch that brings every TCP connection to one listener (TPROXY), as bytes.
//!
//! In the words of nft(8):
//!
//! ```text
//! table inet NAME {
//!     chain NAME {
//!         type filter hook prerouting priority mangle;
//!         meta nfproto ipv4 ip daddr 127.0.0.0/8 accept
//!         meta nfproto ipv6 ip6 daddr ::1 accept
//!         meta l4proto tcp tproxy to :PORT accept
//!     }
//! }
//! ```
//!
//! No `nft` program, no library: one message a fact, in the kernel's own format
//! (linux/netfilter/nf_tables.h).

use super::netlink::{ACKNOWLEDGE, APPEND, Body, CREATE, Messages, REQUEST};

/// Subsystem nftables in the high byte of a message type (linux/netfilter/nfnetlink.h).
const NFTABLES: u16 = 10 << 8;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const NEW_TABLE: u16 = NFTABLES;
const NEW_CHAIN: u16 = NFTABLES | 3;
const NEW_RULE: u16 = NFTABLES | 6;

const FAMILY_INET: u8 = 1;
const FAMILY_IPV4: u8 = 2;
const FAMILY_IPV6: u8 = 10;
const HOOK_PREROUTING: u32 = 0;
const PRIORITY_MANGLE: i32 = -150;

/// Keys of `meta`.
const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
const BASE_NETWORK_HEADER: u32 = 1;
const OP_EQUAL: u32 = 0;
const REGISTER_VERDICT: u32 = 0;
const REGISTER_1: u32 = 1;
const VERDICT_ACCEPT: u32 = 1;
const PROTOCOL_TCP: u8 = 6;

/// Names and port of the rule set.
#[derive(Clone, Copy, Debug)]
pub struct Redirection<'a> {
    pub table: &'a str,
    pub chain: &'a str,
    pub port: u16,
}

/// The whole batch; the kernel applies all of it or none.
pub fn batch(wanted: &Redirection<'_>) -> Messages {
    let mut messages = Messages::default();
    messages.push(BATCH_BEGIN, REQUEST, 0, &head(0, 10), |_| {});
    messages.push(NEW_TABLE, REQUEST, 1, &head(FAMILY_INET, 0), |body| {
        body.text(1, wanted.table);
        body.number(2, 0);
    });
    messages.push(NEW_CHAIN, REQUEST | CREATE, 2, &head(FAMILY_INET, 0), |body| {
        body.text(1, wanted.table);
        body.text(3, wanted.chain);
        body.text(7, "filter");
        body.nested(4, |hook| {
            hook.number(1, HOOK_PREROUTING);
            hook.bytes(2, &PRIORITY_MANGLE.to_be_bytes());
        });
    });
    rule(&mut messages, wanted, 3, 0, |rule| {
        meta(rule, META_NFPROTO);
        equals(rule, &[FAMILY_IPV4]);
        // The first byte of the destination address.
        payload(rule, 16, 1);
        equals(rule, &[127]);
        accept(rule);
    });
    rule(&mut messages, wanted, 4, 0, |rule| {
        meta(rule, META_NFPROTO);
        equals(rule, &[FAMILY_IPV6]);
        payload(rule, 24, 16);
        equals(rule, &std::net::Ipv6Addr::LOCALHOST.octets());
        accept(rule);
    });
    rule(&mut messages, wanted, 5, ACKNOWLEDGE, |rule| {
        meta(rule, META_L4PROTO);
        equals(rule, &[PROTOCOL_TCP]);
        expression(rule, "immediate", |e| {
            e.number(1, REGISTER_1);
            e.nested(2, |value| value.bytes(1, &wanted.port.to_be_bytes()));
        });
        expression(rule, "tproxy", |e| {
            e.number(1, 0);
            e.number(3, REGISTER_1);
        });
        accept(rule);
    });
    messages.push(BATCH_END, REQUEST, 6, &head(0, 10), |_| {});
    messages
}

/// `struct nfgenmsg`: family, version 0, a resource number in network order.
fn head(family: u8, resource: u16) -> [u8; 4] {
    let [high, low] = resource.to_be_bytes();
    [family, 0, high, low]
}

fn rule(
    messages: &mut Messages,
    wanted: &Redirection<'_>,
    sequence: u32,
    flags: u16,
    expressions: impl FnOnce(&mut Body<'_>),
) {
    let flags = REQUEST | CREATE | APPEND | flags;
    messages.push(NEW_RULE, flags, sequence, &head(FAMILY_INET, 0), |body| {
        body.text(1, wanted.table);
        body.text(2, wanted.chain);
        body.nested(4, expressions);
    });
}

fn expression(rule: &mut Body<'_>, name: &str, inner: impl FnOnce(&mut Body<'_>)) {
    rule.nested(1, |element| {
        element.text(1, name);
        element.nested(2, inner);
    });
}

fn meta(rule: &mut Body<'_>, key: u32) {
    expression(rule, "meta", |e| {
        e.number(2, key);
        e.number(1, REGISTER_1);
    });
}

fn payload(rule: &mut Body<'_>, offset: u32, length: u32) {
    expression(rule, "payload", |e| {
        e.number(1, REGISTER_1);
        e.number(2, BASE_NETWORK_HEADER);
        e.number(3, offset);
        e.number(4, length);
    });
}

fn equals(rule: &mut Body<'_>, value: &[u8]) {
    expression(rule, "cmp", |e| {
        e.number(1, REGISTER_1);
        e.number(2, OP_EQUAL);
        e.nested(3, |data| data.bytes(1, value));
    });
}

fn accept(rule: &mut Body<'_>) {
    expression(rule, "immediate", |e| {
        e.number(1, REGISTER_VERDICT);
        e.nested(2, |data| data.nested(2, |verdict| verdict.number(1, VERDICT_ACCEPT)));
    });
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_batch_is_what_the_nft_program_sends_for_the_same_rules() {
        let wanted = Redirection { table: "sbx", chain: "pre", port: 15001 };

        let mut bytes = batch(&wanted).bytes().to_vec();

        // The recording was made without the acknowledgement that we ask for.
        let last_rule_flags = bytes.len() - 20 - 248 + 6;
        bytes[last_rule_flags] &= !(ACKNOWLEDGE as u8);
        assert_eq!(bytes.len(), 932);
        assert_eq!(hex::encode(Sha256::digest(&bytes)), RECORDED_SHA256);
    }

    const RECORDED_SHA256: &str =
        "e5e9a22ecc20304f14810a6b80a1255dfea14bed4ee3dab9006f6dd9edeb74e8";
}
