//! Who speaks first on a connection to a port, as far as the port tells.
//!
//! It matters for connections that are refused: a client that speaks first can be told why in its
//! own protocol, and one that waits for the server's word is cut off, the sooner the better. What
//! policy passes on unread waits for nobody's word.

/// Who speaks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    Client,
    Server,
    Unknown,
}

/// Protocols in which the server does, or can be taken to: their clients say nothing before.
const SERVERS: [u16; 35] = [
    13, 17, 19, // daytime, quote of the day, character generator
    21, 2121, // FTP
    22, 2022, 2222, 22222, // SSH
    23, 2323, // telnet
    25, 26, 587, 1025, 2525, // SMTP and submission
    37,   // time
    106, 110, // mail passwords, POP3
    119, 433, // NNTP
    143, 220, // IMAP
    2000, 4190, // ManageSieve
    3306, 3307, 33060, // MySQL
    5038,  // Asterisk
    5900, 5901, 5902, 5903, // VNC
    6600, // MPD
    6667, // IRC, whose servers look the client up first
];

/// Protocols of HTTP or TLS from the first byte.
const CLIENTS: [u16; 36] = [
    80, 81, 443, 591, 2083, 2087, 2376, 3000, 3001, 3128, 4000, 4200, 4318, 4443, 5000, 5001, 5173,
    5601, 6443, 8000, 8001, 8008, 8080, 8081, 8088, 8200, 8443, 8500, 8800, 8888, 9000, 9090, 9200,
    9443, 10443, 15672,
];
/// The same, of TLS alone: SMTP, LDAP, NNTP, FTP, telnet, IMAP, POP3, MQTT and AMQP.
const CLIENTS_TLS: [u16; 9] = [465, 563, 636, 990, 992, 993, 995, 8883, 5671];

/// Who speaks first at a port.
pub fn who_speaks_first(port: u16) -> First {
    if SERVERS.contains(&port) {
        First::Server
    } else if CLIENTS.contains(&port) || CLIENTS_TLS.contains(&port) {
        First::Client
    } else {
        First::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_of_both_kinds() {
        let clients = || CLIENTS.iter().chain(&CLIENTS_TLS);

        assert!(clients().all(|port| who_speaks_first(*port) == First::Client));
        assert!(SERVERS.iter().all(|port| who_speaks_first(*port) == First::Server));
        assert_eq!(who_speaks_first(40_000), First::Unknown);
    }
}
