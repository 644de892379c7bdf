//! Which addresses a permitted name may lead to.
//!
//! A public name can be made to resolve to anything, so the address is judged before the dial:
//! private ones need a rule that names them, metadata services and link-local ones a rule that
//! names exactly that address, and what is no destination is never dialled.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::host::fold;

/// A range of addresses: `10.2.0.0/16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    base: IpAddr,
    prefix: u8,
}

/// What an address is, as far as the decision goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressClass {
    Public,
    /// Allowed only where a rule names it.
    Private(&'static str),
    /// Allowed only where a rule names it and no other beside it: a range names nobody's metadata
    /// service on purpose.
    Sensitive(&'static str),
    /// Never dialled.
    Forbidden(&'static str),
}

impl AddressRange {
    /// Reads `ADDRESS/PREFIX` or one address. The error is a reason for the operator.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (base, prefix) = match text.split_once('/') {
            Some((base, prefix)) => (base, Some(prefix)),
            None => (text, None),
        };
        let base: IpAddr = base.parse().map_err(|_| "not an address or a range".to_owned())?;
        if fold(base) != base {
            return Err("write IPv4 addresses as IPv4".to_owned());
        }
        let bits = bits(base);
        let prefix = match prefix {
            None => bits,
            Some(text) => text
                .parse()
                .ok()
                .filter(|prefix| *prefix <= bits)
                .ok_or_else(|| format!("the number after the slash is 0 to {bits}"))?,
        };
        let range = Self { base, prefix };
        if range.masked(base) != range.value() {
            return Err(format!("the address has bits set behind the first {prefix}"));
        }
        Ok(range)
    }

    const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Self {
        Self { base: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
    }

    const fn v6(s: [u16; 8], prefix: u8) -> Self {
        let ip = Ipv6Addr::new(s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
        Self { base: IpAddr::V6(ip), prefix }
    }

    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    pub fn is_single(&self) -> bool {
        self.prefix == bits(self.base)
    }

    /// Whether this is that address and no other.
    pub fn is_exactly(&self, ip: IpAddr) -> bool {
        self.is_single() && self.contains(ip)
    }

    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = fold(ip);
        ip.is_ipv4() == self.base.is_ipv4() && self.masked(ip) == self.value()
    }

    /// Whether every address of the other range is in this one.
    pub fn covers(&self, other: &AddressRange) -> bool {
        other.prefix >= self.prefix && self.contains(other.base)
    }

    fn value(&self) -> u128 {
        value(self.base)
    }

    fn masked(&self, ip: IpAddr) -> u128 {
        let host_bits = u32::from(bits(ip) - self.prefix);
        u128::MAX.checked_shl(host_bits).map_or(0, |mask| value(ip) & mask)
    }
}

fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

fn value(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.prefix == bits(self.base) {
            write!(f, "{}", self.base)
        } else {
            write!(f, "{}/{}", self.base, self.prefix)
        }
    }
}

/// Metadata services hand out the host's own cloud credentials to whoever asks; link-local
/// addresses are where they live, and where a host's other services for itself do.
const SENSITIVE: &[(AddressRange, &str)] = &[
    (AddressRange::v4(169, 254, 0, 0, 16), "link-local (cloud metadata services)"),
    (AddressRange::v4(100, 100, 100, 200, 32), "a cloud metadata service"),
    (AddressRange::v4(192, 0, 0, 192, 32), "a cloud metadata service"),
    (AddressRange::v4(168, 63, 129, 16, 32), "a cloud metadata service"),
    (AddressRange::v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128), "a cloud metadata service"),
    (AddressRange::v6([0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42], 128), "a cloud metadata service"),
    (AddressRange::v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), "a cloud metadata service"),
    (AddressRange::v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), "link-local"),
];

/// Never dialled: no destination for a TCP connection.
const FORBIDDEN: &[(AddressRange, &str)] = &[
    // Linux takes 0.0.0.0 and :: as the host itself.
    (AddressRange::v4(0, 0, 0, 0, 8), "unspecified"),
    (AddressRange::v6([0; 8], 128), "unspecified"),
    (AddressRange::v4(224, 0, 0, 0, 4), "multicast"),
    (AddressRange::v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), "multicast"),
    (AddressRange::v4(240, 0, 0, 0, 4), "reserved or broadcast"),
];

/// Not reachable from the public network, by the IANA special-purpose registries (RFC 6890).
const PRIVATE: &[(AddressRange, &str)] = &[
    (AddressRange::v4(127, 0, 0, 0, 8), "loopback"),
    (AddressRange::v4(10, 0, 0, 0, 8), "private"),
    (AddressRange::v4(172, 16, 0, 0, 12), "private"),
    (AddressRange::v4(192, 168, 0, 0, 16), "private"),
    (AddressRange::v4(100, 64, 0, 0, 10), "shared by a carrier's customers"),
    (AddressRange::v4(192, 0, 0, 0, 24), "for protocols"),
    (AddressRange::v4(192, 0, 2, 0, 24), "for documentation"),
    (AddressRange::v4(192, 88, 99, 0, 24), "a 6to4 relay"),
    (AddressRange::v4(198, 18, 0, 0, 15), "for benchmarks"),
    (AddressRange::v4(198, 51, 100, 0, 24), "for documentation"),
    (AddressRange::v4(203, 0, 113, 0, 24), "for documentation"),
];

/// IPv6 addresses that hold an IPv4 address which a gateway or tunnel would dial.
struct Embedding {
    range: AddressRange,
    /// How far the IPv4 address is from the end, in bits.
    shift: u32,
    /// Teredo writes it with every bit turned over.
    mask: u32,
    what: &'static str,
}

impl Embedding {
    const fn new(prefix: ([u16; 8], u8), shift: u32, mask: u32, what: &'static str) -> Self {
        Self { range: AddressRange::v6(prefix.0, prefix.1), shift, mask, what }
    }
}

const EMBEDDINGS: &[Embedding] = &[
    Embedding::new(([0; 8], 96), 0, 0, "IPv4-compatible"),
    Embedding::new(([0, 0, 0, 0, 0xffff, 0, 0, 0], 96), 0, 0, "IPv4-translated"),
    Embedding::new(([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), 0, 0, "NAT64"),
    Embedding::new(([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), 80, 0, "6to4"),
    Embedding::new(([0x2001, 0, 0, 0, 0, 0, 0, 0], 32), 0, u32::MAX, "Teredo"),
];

/// The one prefix whose IPv4 address is what a host without IPv4 reaches (RFC 6052 section 3.1):
/// its resolver gives such addresses for every name, so they count as what they hold.
const NAT64: AddressRange = AddressRange::v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

/// Global unicast (RFC 4291 section 2.4): outside it no IPv6 address is public.
const GLOBAL_V6: AddressRange = AddressRange::v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

const PRIVATE_V6: &[(AddressRange, &str)] = &[
    (AddressRange::v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), "for protocols"),
    (AddressRange::v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), "for documentation"),
    (AddressRange::v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), "for documentation"),
];

/// Says what an address is.
pub fn classify(ip: IpAddr) -> AddressClass {
    let ip = fold(ip);
    if let Some(what) = named(FORBIDDEN, ip) {
        return AddressClass::Forbidden(what);
    }
    if let Some(what) = named(SENSITIVE, ip) {
        return AddressClass::Sensitive(what);
    }
    let IpAddr::V6(v6) = ip else {
        return named(PRIVATE, ip).map_or(AddressClass::Public, AddressClass::Private);
    };
    if v6 == Ipv6Addr::LOCALHOST {
        return AddressClass::Private("loopback");
    }
    if NAT64.contains(ip) {
        return classify(Ipv4Addr::from_bits(v6.to_bits() as u32).into());
    }
    if let Some(embedding) = EMBEDDINGS.iter().find(|embedding| embedding.range.contains(ip)) {
        let inner = (v6.to_bits() >> embedding.shift) as u32 ^ embedding.mask;
        return match classify(Ipv4Addr::from_bits(inner).into()) {
            AddressClass::Public | AddressClass::Private(_) => {
                AddressClass::Private(embedding.what)
            }
            worse => worse,
        };
    }
    if !GLOBAL_V6.contains(ip) {
        return AddressClass::Private("private");
    }
    named(PRIVATE_V6, ip).map_or(AddressClass::Public, AddressClass::Private)
}

/// Why a range can never be of use in a policy, if so.
pub(crate) fn always_forbidden(range: &AddressRange) -> Option<&'static str> {
    FORBIDDEN.iter().find(|(forbidden, _)| forbidden.covers(range)).map(|(_, what)| *what)
}

/// What is said of addresses that need to be named one by one, if all of a range are such.
pub(crate) fn sensitive(range: &AddressRange) -> Option<&'static str> {
    SENSITIVE.iter().find(|(sensitive, _)| sensitive.covers(range)).map(|(_, what)| *what)
}

fn named(table: &[(AddressRange, &'static str)], ip: IpAddr) -> Option<&'static str> {
    table.iter().find(|(range, _)| range.contains(ip)).map(|(_, what)| *what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_contain_what_they_say() {
        for (range, inside, outside) in [
            ("10.2.0.0/16", "10.2.255.255", "10.3.0.0"),
            ("10.2.3.4", "10.2.3.4", "10.2.3.5"),
            ("127.0.0.1/32", "::ffff:127.0.0.1", "127.0.0.2"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("::1", "::1", "0.0.0.1"),
            ("0.0.0.0/0", "8.8.8.8", "::8.8.8.8"),
        ] {
            let range = AddressRange::parse(range).unwrap();
            assert!(range.contains(inside.parse().unwrap()), "{range} {inside}");
            assert!(!range.contains(outside.parse().unwrap()), "{range} {outside}");
        }
    }

    #[test]
    fn refuses_ranges_that_say_something_else_than_they_mean() {
        for text in [
            "",
            "x",
            "10.0.0.0/33",
            "10.0.0.1/8",
            "::1/129",
            "10.0.0.0/",
            "10/8",
            "::ffff:10.0.0.1",
        ] {
            assert!(AddressRange::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn classes_of_addresses() {
        for (class, addresses) in [
            (
                "forbidden",
                "0.0.0.0 0.1.2.3 :: 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 ff02::1 \
                ff0e::1 ::ffff:0.0.0.0 64:ff9b::224.0.0.1 2002:e000:1:: ::ffff:0:240.0.0.1",
            ),
            (
                "sensitive",
                "169.254.169.254 169.254.0.1 ::ffff:169.254.169.254 fd00:ec2::254 fd00:42::42 \
                fd20:ce::254 fe80::1 febf::1 100.100.100.200 192.0.0.192 168.63.129.16 \
                64:ff9b::169.254.169.254 2002:a9fe:a9fe::1 ::169.254.169.254 \
                2001:0:808:808:0:ffff:5601:5601 64:ff9b:1::a9fe:a9fe",
            ),
            (
                "private",
                "64:ff9b::127.0.0.1 64:ff9b::10.0.0.1 127.0.0.1 127.255.255.255 10.0.0.1 \
                172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1 192.0.2.1 198.18.0.1 \
                ::1 fc00::1 fd12::1 fec0::1 2001:db8::1 2001:2::1 \
                2001:0:808:808::f7f7:f7f7 64:ff9b:1::1.2.3.4 2002:808:808::1 ::ffff:10.0.0.1 \
                ::8.8.8.8",
            ),
            (
                "public",
                "8.8.8.8 93.184.216.34 172.32.0.1 100.128.0.1 2606:4700::1111 \
                2001:4860:4860::8888 ::ffff:8.8.8.8 64:ff9b::8.8.8.8",
            ),
        ] {
            for text in addresses.split_whitespace() {
                let found = match classify(text.parse().unwrap()) {
                    AddressClass::Public => "public",
                    AddressClass::Private(_) => "private",
                    AddressClass::Sensitive(_) => "sensitive",
                    AddressClass::Forbidden(_) => "forbidden",
                };
                assert_eq!(found, class, "{text}");
            }
        }
    }
}
