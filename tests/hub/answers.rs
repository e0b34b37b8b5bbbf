//! Hubs that refuse, are not there, or are none.

use std::fs;

use super::server::{Behaviour, COMMIT, REPO};
use super::{said, serve, Place, WEIGHTS};
use crate::support::fixture;

#[test]
fn gated_models_and_tokens() {
    let server = serve("opt-pre-ln", &[], &[]);
    server.behave(Behaviour {
        token: Some("hf_good"),
        ..Behaviour::default()
    });
    let place = Place::new();
    let page = format!("{}/{REPO}", server.endpoint());
    let token_path = place.home().join("token");
    let parts = [
        &page,
        "401",
        "without a token",
        "licence",
        "HF_TOKEN",
        token_path.to_str().unwrap(),
    ];
    place.convert(&server, &[]).is_refusal(&parts);
    server.behave(Behaviour {
        token: Some("hf_good"),
        is_list_open: true,
        ..Behaviour::default()
    });
    let parts = [&page, "config.json", "401", "without a token", "licence"];
    place.convert(&server, &[]).is_refusal(&parts);
    let mut command = place.command(&server.endpoint(), &[]);
    let wrong = said(command.env("HF_TOKEN", "hf_bad"));
    wrong.is_refusal(&["401", "with the token in use", "licence"]);
    assert!(!wrong.stderr.contains("hf_bad"), "a token was shown");
    said(command.env("HF_TOKEN", "hf\nbad")).is_refusal(&["is no token"]);
    said(command.env("HF_TOKEN", "hf_good")).is_success();

    let place = Place::new();
    fs::write(place.home().join("token"), "hf_good\n").unwrap();
    server.asked();
    said(place.command(&server.endpoint(), &[]).env("HF_TOKEN", "")).is_success();
    let asked = server.asked();
    assert!(!asked.is_empty());
    for asked in asked {
        assert_eq!(asked.authorization.as_deref(), Some("Bearer hf_good"));
    }
}

#[test]
fn without_a_network() {
    let server = serve("opt-pre-ln", &[], &[]);
    let place = Place::new();
    place.convert(&server, &[]).is_success();
    server.behave(Behaviour {
        status: Some(502),
        ..Behaviour::default()
    });
    let said_broken = place.convert(&server, &[]);
    assert!(said_broken.is_success().stdout.contains("out of reach"));
    let (endpoint, etag) = (server.endpoint(), server.etag(WEIGHTS));
    drop(server);
    fs::remove_dir_all(place.out()).unwrap();
    let said_offline = said(&mut place.command(&endpoint, &[]));
    assert!(
        said_offline.is_success().stdout.contains("out of reach"),
        "{}",
        said_offline.stdout
    );
    place.is_conversion_of(&fixture("opt-pre-ln"));
    said(&mut place.command(&endpoint, &["--revision", COMMIT])).is_success();

    let parts = [
        endpoint.as_str(),
        "cannot be reached",
        "network",
        "by other means",
    ];
    said(&mut place.command(&endpoint, &["--revision", "v2"])).is_refusal(&parts);
    fs::remove_file(place.cached(&format!("blobs/{etag}"))).unwrap();
    said(&mut place.command(&endpoint, &[])).is_refusal(&parts);
    said(&mut place.command("http://no-such-host.invalid", &[]))
        .is_refusal(&["no-such-host", "network"]);
    said(&mut place.command("nonsense", &[])).is_refusal(&["nonsense", "HF_ENDPOINT"]);
}

#[test]
fn odd_answers() {
    let server = serve("opt-pre-ln", &[], &[]);
    let well = Behaviour::default;
    let cases: [(Behaviour, &[&str]); 7] = [
        (
            Behaviour {
                is_html: true,
                ..well()
            },
            &[
                "does not answer as the hub does",
                "HF_ENDPOINT",
                "login page",
            ],
        ),
        (
            Behaviour {
                is_silent: true,
                ..well()
            },
            &["sent nothing for 1 s", "run the same command again"],
        ),
        (
            Behaviour {
                has_no_parts: true,
                ..well()
            },
            &["HTTP Range", "config.json", "by other means"],
        ),
        (
            Behaviour {
                leads_nowhere: true,
                ..well()
            },
            &["does not answer as the hub does (location"],
        ),
        (
            Behaviour {
                status: Some(429),
                ..well()
            },
            &["429", "minutes", "HF_TOKEN"],
        ),
        (
            Behaviour {
                status: Some(503),
                ..well()
            },
            &["503", "later"],
        ),
        (
            Behaviour {
                status: Some(403),
                ..well()
            },
            &["403", "licence"],
        ),
    ];
    for (behaviour, parts) in cases {
        let place = Place::new();
        server.behave(behaviour);
        let mut command = place.command(&server.endpoint(), &[]);
        let said = said(command.env("HF_HUB_DOWNLOAD_TIMEOUT", "1"));
        said.is_refusal(&[parts, &[&server.endpoint()]].concat());
        assert!(!place.out().exists());
    }
}
