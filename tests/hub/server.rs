//! A small hub: the list of a model's files, the files themselves in parts, and what real servers do wrong.
//!
//! Like the real one it sends large files from another address, by a redirect that carries their etag.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use wick_format::FileHasher;

pub(super) const REPO: &str = "lab/tiny";
pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Longer than any test waits.
const SILENCE: Duration = Duration::from_secs(60);

/// What a request asked for.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) path: String,
    /// First byte of the part, and whether it has an end.
    pub(super) range: Option<(usize, bool)>,
    pub(super) authorization: Option<String>,
}

/// How the server behaves, other than well.
#[derive(Clone, Debug, Default)]
pub(super) struct Behaviour {
    /// Only for requests with this token.
    pub(super) token: Option<&'static str>,
    /// The list is for everybody, as the real hub has it for gated models.
    pub(super) is_list_open: bool,
    /// Every answer has this status.
    pub(super) status: Option<u16>,
    /// A login page instead of the list.
    pub(super) is_html: bool,
    /// Takes requests and never answers; with `cut_bytes` it falls silent there.
    pub(super) is_silent: bool,
    /// Weights end after so many bytes.
    pub(super) cut_bytes: Option<usize>,
    /// Weights come slowly.
    pub(super) is_slow: bool,
    /// Redirects without an address.
    pub(super) leads_nowhere: bool,
    /// Parts are not to be had.
    pub(super) has_no_parts: bool,
    /// Parts are to be had, but an open end brings the whole file.
    pub(super) forgets_parts: bool,
}

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    /// In the list, and nowhere else.
    phantoms: BTreeSet<String>,
    revision: String,
    address: SocketAddr,
    behaviour: Mutex<Behaviour>,
    log: Mutex<Vec<Asked>>,
    is_closed: AtomicBool,
}

/// A server with one model at one revision, until it is dropped.
pub(super) struct Server(Arc<Shared>);

impl Server {
    pub(super) fn start(
        files: BTreeMap<String, Vec<u8>>,
        phantoms: &[&str],
        revision: &str,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shared = Arc::new(Shared {
            files,
            phantoms: phantoms.iter().map(|&name| name.to_owned()).collect(),
            revision: revision.to_owned(),
            address: listener.local_addr().unwrap(),
            behaviour: Mutex::default(),
            log: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        let server = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map(Result::unwrap) {
                if server.is_closed.load(Ordering::SeqCst) {
                    break;
                }
                let server = server.clone();
                // A client that leaves is no failure: some tests kill it.
                thread::spawn(move || server.answer(stream).ok());
            }
        });
        Self(shared)
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://{}", self.0.address)
    }

    pub(super) fn behave(&self, behaviour: Behaviour) {
        *self.0.behaviour.lock().unwrap() = behaviour;
    }

    /// The requests since the last call.
    pub(super) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.0.log.lock().unwrap())
    }

    pub(super) fn etag(&self, name: &str) -> String {
        etag(&self.0.files[name])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::SeqCst);
        let _wakes_it_up = TcpStream::connect(self.0.address);
    }
}

impl Shared {
    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let asked = read_request(&stream)?;
        self.log.lock().unwrap().push(asked.clone());
        let behaviour = self.behaviour.lock().unwrap().clone();
        if behaviour.is_silent && behaviour.cut_bytes.is_none() {
            thread::sleep(SILENCE);
            return Ok(());
        }
        if let Some(status) = behaviour.status {
            return respond(&mut stream, status, "", b"");
        }
        let expected = behaviour.token.map(|token| format!("Bearer {token}"));
        let list = format!("/api/models/{REPO}/revision/{}", self.revision);
        let is_open = behaviour.is_list_open && asked.path == list;
        if expected.is_some() && expected != asked.authorization && !is_open {
            return respond(&mut stream, 401, "", b"");
        }
        let resolve = format!("/{REPO}/resolve/{COMMIT}/");
        if asked.path == list && behaviour.is_html {
            respond(
                &mut stream,
                200,
                "content-type: text/html\r\n",
                b"<html>Please log in</html>",
            )
        } else if asked.path == list {
            let names = self.files.keys().chain(&self.phantoms);
            let siblings: Vec<_> = names
                .map(|name| serde_json::json!({"rfilename": name}))
                .collect();
            let info = serde_json::json!({"id": REPO, "sha": COMMIT, "siblings": siblings});
            let json = "content-type: application/json\r\n";
            respond(&mut stream, 200, json, info.to_string().as_bytes())
        } else if let Some((name, file)) = self.file(&asked.path, &resolve) {
            let commit = format!("x-repo-commit: {COMMIT}\r\n");
            if name.ends_with(".json") {
                let headers = format!("{commit}etag: \"{}\"\r\n", etag(file));
                return send(&mut stream, file, &headers, &asked, &behaviour);
            }
            if behaviour.leads_nowhere {
                return respond(&mut stream, 302, &format!("{commit}etag: x\r\n"), b"");
            }
            let headers = format!(
                "{commit}x-linked-etag: \"{}\"\r\nlocation: http://{}/elsewhere/{name}\r\n",
                etag(file),
                self.address
            );
            respond(&mut stream, 302, &headers, b"")
        } else if let Some((_, file)) = self.file(&asked.path, "/elsewhere/") {
            send(&mut stream, file, "", &asked, &behaviour)
        } else {
            respond(&mut stream, 404, "", b"")
        }
    }

    fn file<'a>(&'a self, path: &'a str, folder: &str) -> Option<(&'a str, &'a [u8])> {
        let name = path.strip_prefix(folder)?;
        self.files.get(name).map(|file| (name, file.as_slice()))
    }
}

fn read_request(stream: &TcpStream) -> std::io::Result<Asked> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut asked = Asked {
        path: first.split(' ').nth(1).unwrap_or_default().to_owned(),
        range: None,
        authorization: None,
    };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (start, end) = value
                    .strip_prefix("bytes=")
                    .unwrap()
                    .split_once('-')
                    .unwrap();
                asked.range = Some((start.parse().unwrap(), !end.is_empty()));
            }
            "authorization" => asked.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(asked)
}

/// A file, or the part of it that was asked for: one byte or all to the end.
fn send(
    stream: &mut TcpStream,
    file: &[u8],
    headers: &str,
    asked: &Asked,
    behaviour: &Behaviour,
) -> std::io::Result<()> {
    let part = asked
        .range
        .filter(|&(_, has_end)| !behaviour.has_no_parts && (has_end || !behaviour.forgets_parts));
    let Some((start, has_end)) = part else {
        return respond(stream, 200, headers, file);
    };
    if start >= file.len() {
        return respond(stream, 416, "", b"");
    }
    let end = if has_end { start + 1 } else { file.len() };
    let (last, total) = (end - 1, file.len());
    let range = format!("content-range: bytes {start}-{last}/{total}\r\n");
    head(stream, 206, &format!("{headers}{range}"), end - start)?;
    let body = &file[start..end];
    if body.len() < 2 {
        return stream.write_all(body);
    }
    let body = &body[..body.len().min(behaviour.cut_bytes.unwrap_or(usize::MAX))];
    for piece in body.chunks(1 << 14) {
        stream.write_all(piece)?;
        if behaviour.is_slow {
            thread::sleep(Duration::from_millis(20));
        }
    }
    if behaviour.is_silent {
        thread::sleep(SILENCE);
    }
    Ok(())
}

fn respond(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<()> {
    head(stream, status, headers, body.len())?;
    stream.write_all(body)
}

fn head(stream: &mut TcpStream, status: u16, headers: &str, len: usize) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status} Said\r\nconnection: close\r\ncontent-length: {len}\r\n{headers}\r\n"
    )
}

fn etag(bytes: &[u8]) -> String {
    let mut hasher = FileHasher::new();
    hasher.update(bytes);
    hasher.hex()
}
