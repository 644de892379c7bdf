//! One GET over HTTP/1.1, blocking, in a process of its own.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::url::Url;
use crate::trust::BUNDLE;

const HEAD_BYTES_MAX: u64 = 64 * 1024;
const FIELDS_MAX: usize = 128;
/// Longest line that announces a chunk.
const LINE_BYTES_MAX: u64 = 1024;
/// Most answers that only announce another one.
const INTERIM_MAX: usize = 16;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// What a server answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub reason: String,
    /// Names in lower case.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The body was longer than was wanted.
    pub cut: bool,
}

impl Answer {
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Where the page is instead.
    pub fn redirection(&self) -> Option<&str> {
        matches!(self.status, 301 | 302 | 303 | 307 | 308).then(|| self.field("location"))?
    }

    /// In lower case, without parameters; empty where the server does not say.
    pub fn media_type(&self) -> String {
        let value = self.field("content-type").unwrap_or_default();
        value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
    }

    /// How the server says that its text is written.
    pub fn charset(&self) -> Option<String> {
        let value = self.field("content-type").unwrap_or_default().to_ascii_lowercase();
        let charset = value.split(';').find_map(|part| part.trim().strip_prefix("charset="))?;
        Some(charset.trim_matches('"').to_owned())
    }

    fn field(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// Asks for `url`; reads no more than `bytes_max` of the body. The error is a text for the model.
pub fn get(url: &Url, bytes_max: usize, deadline: Instant) -> Result<Answer, String> {
    let mut stream = BufReader::new(connect(url, deadline)?);
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: cleanhands/{}\r\n\
         Accept: text/html, text/*;q=0.9, application/json;q=0.9, */*;q=0.5\r\n\
         Accept-Encoding: identity\r\nConnection: close\r\n\r\n",
        url.target,
        url.authority(),
        env!("CARGO_PKG_VERSION"),
    );
    let fail = |error: std::io::Error| reason(&error);
    stream.get_mut().write_all(request.as_bytes()).map_err(fail)?;
    stream.get_mut().flush().map_err(fail)?;
    let mut answer = final_head(&mut stream)?;
    body(&mut stream, &mut answer, bytes_max)?;
    Ok(answer)
}

/// The head of the answer itself, behind those that only announce it.
fn final_head(stream: &mut impl BufRead) -> Result<Answer, String> {
    for _ in 0..=INTERIM_MAX {
        let answer = head(stream)?;
        if !(100..200).contains(&answer.status) {
            return Ok(answer);
        }
    }
    Err("the answer is announced again and again, and does not come".into())
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

/// A stream on which no operation outlives the deadline.
struct Timed {
    stream: TcpStream,
    deadline: Instant,
}

impl Timed {
    fn left(&self) -> std::io::Result<Option<Duration>> {
        match self.deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

fn connect(url: &Url, deadline: Instant) -> Result<Box<dyn ReadWrite>, String> {
    let addresses = (url.host.as_str(), url.port).to_socket_addrs();
    let addresses = addresses.map_err(|_| format!("{} is not known", url.host))?;
    let mut why = format!("{} has no address", url.host);
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now()).min(CONNECT_TIMEOUT);
        if left.is_zero() {
            return Err(reason(&ErrorKind::TimedOut.into()));
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                let stream = Timed { stream, deadline };
                return if url.tls { encrypted(url, stream) } else { Ok(Box::new(stream)) };
            }
            Err(error) => why = format!("cannot connect: {}", reason(&error)),
        }
    }
    Err(why)
}

fn encrypted(url: &Url, stream: Timed) -> Result<Box<dyn ReadWrite>, String> {
    let name = ServerName::try_from(url.host.clone()).map_err(|error| error.to_string())?;
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(BUNDLE)
        .map_err(|error| format!("cannot read the trusted certificates: {error}"))?;
    // One that cannot be read is trusted by nobody.
    roots.add_parsable_certificates(certificates.filter_map(Result::ok));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let connection =
        ClientConnection::new(Arc::new(config), name).map_err(|error| error.to_string())?;
    Ok(Box::new(StreamOwned::new(connection, stream)))
}

fn head(stream: &mut impl BufRead) -> Result<Answer, String> {
    let mut bytes = Vec::new();
    let mut limited = stream.take(HEAD_BYTES_MAX);
    while !bytes.ends_with(b"\r\n\r\n") && !bytes.ends_with(b"\n\n") {
        match limited.read_until(b'\n', &mut bytes).map_err(|error| reason(&error))? {
            0 if bytes.is_empty() => return Err("the connection was closed unanswered".into()),
            0 => return Err("the head of the answer broke off or is too long".into()),
            _ => {}
        }
    }
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut parsed = httparse::Response::new(&mut fields);
    match parsed.parse(&bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        _ => return Err("the answer is not HTTP".into()),
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok(Answer {
        status: parsed.code.unwrap_or_default(),
        reason: parsed.reason.unwrap_or_default().to_owned(),
        fields: parsed
            .headers
            .iter()
            .map(|field| (field.name.to_ascii_lowercase(), text(field.value)))
            .collect(),
        body: Vec::new(),
        cut: false,
    })
}

fn body(stream: &mut impl BufRead, answer: &mut Answer, bytes_max: usize) -> Result<(), String> {
    if matches!(answer.status, 204 | 304) {
        return Ok(());
    }
    if let Some(coding) = answer.field("content-encoding").filter(|c| *c != "identity") {
        return Err(format!("the answer is packed by {coding}, which was not asked for"));
    }
    let chunked = answer.field("transfer-encoding").map(str::to_ascii_lowercase);
    match (chunked, answer.field("content-length").map(str::parse::<u64>)) {
        (Some(coding), _) if coding == "chunked" => chunks(stream, answer, bytes_max),
        (Some(coding), _) => Err(format!("the answer is sent as {coding}")),
        (None, Some(Ok(length))) => {
            piece(stream, answer, length, bytes_max)?;
            Ok(())
        }
        (None, Some(Err(_))) => Err("the length of the answer is not readable".into()),
        (None, None) => {
            let room = bytes_max as u64 + 1;
            let read = stream.take(room).read_to_end(&mut answer.body);
            read.map_err(|error| reason(&error))?;
            answer.cut = answer.body.len() > bytes_max;
            answer.body.truncate(bytes_max);
            Ok(())
        }
    }
}

/// So many bytes; false when the body is as long as was wanted before its end.
fn piece(
    stream: &mut impl BufRead,
    answer: &mut Answer,
    length: u64,
    bytes_max: usize,
) -> Result<bool, String> {
    let room = (bytes_max - answer.body.len()) as u64;
    let wanted = length.min(room);
    let read = stream.take(wanted).read_to_end(&mut answer.body);
    let read = read.map_err(|error| reason(&error))? as u64;
    if read < wanted {
        return Err(format!("the answer broke off after {} bytes", answer.body.len()));
    }
    answer.cut |= length > room;
    Ok(length <= room)
}

fn chunks(stream: &mut impl BufRead, answer: &mut Answer, bytes_max: usize) -> Result<(), String> {
    let broken = || "the answer is not chunked as it says".to_owned();
    loop {
        let size = line(stream)?;
        let size = size.split(';').next().unwrap_or_default().trim();
        let size = u64::from_str_radix(size, 16).map_err(|_| broken())?;
        if size == 0 {
            return Ok(());
        }
        if !piece(stream, answer, size, bytes_max)? {
            return Ok(());
        }
        if !line(stream)?.is_empty() {
            return Err(broken());
        }
    }
}

fn line(stream: &mut impl BufRead) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = stream.take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
    read.map_err(|error| reason(&error))?;
    if !bytes.ends_with(b"\n") {
        return Err("the answer broke off".into());
    }
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "no answer in time".to_owned(),
        ErrorKind::UnexpectedEof => "the connection broke off".to_owned(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "the connection was reset".to_owned(),
        ErrorKind::ConnectionRefused => "the connection was refused".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], bytes_max: usize) -> Result<Answer, String> {
        let mut stream = bytes;
        let mut answer = final_head(&mut stream)?;
        body(&mut stream, &mut answer, bytes_max)?;
        Ok(answer)
    }

    #[test]
    fn bodies_are_read_however_they_are_framed_and_no_further_than_wanted() {
        let table: [(&[u8], &[u8], bool); 7] = [
            (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcd", b"abc", false),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcdefghi", b"abcde", true),
            (b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\n\r\nabc", b"abc", false),
            (b"HTTP/1.0 200 OK\r\n\r\nabc", b"abc", false),
            (b"HTTP/1.0 200 OK\r\n\r\nabcdefgh", b"abcde", true),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                    2;x=y\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
                b"abc",
                false,
            ),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\nabcdefgh",
                b"abcde",
                true,
            ),
        ];
        for (bytes, expected, cut) in table {
            let answer = read(bytes, 5).unwrap();

            assert_eq!((answer.body.as_slice(), answer.cut), (expected, cut));
        }
    }

    #[test]
    fn what_breaks_off_or_is_no_answer_is_an_error() {
        let table: [&[u8]; 8] = [
            b"",
            b"HTTP/1.1 200",
            b"SSH-2.0-x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nab",
            b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\nabc",
        ];
        for bytes in table {
            assert!(read(bytes, 100).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
        let endless = [b"HTTP/1.1 200 OK\r\n".as_slice(), &b"X: y\r\n".repeat(20_000)].concat();
        assert!(read(&endless, 100).is_err());
        assert!(read(&b"HTTP/1.1 100 Continue\r\n\r\n".repeat(100), 100).is_err());
    }
}
