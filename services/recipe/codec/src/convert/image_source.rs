//! Image blocks at conversion: what is accepted, and the text when it is not (recipe.md, 11.1).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use data_url::DataUrl;

use super::bad;
use crate::types::{Detail, Error, ImageData, ImageSource};

/// Longest external link, in bytes.
pub const MAX_LINK_BYTES: usize = 8192;

const IMAGE_TYPES: [&str; 5] = ["jpeg", "jpg", "png", "gif", "webp"];

pub const FILE_ID_UNSUPPORTED: &str =
    "file_id is not supported. Pass the image as a base64 data url instead.";

/// Whether `url` is fetched from outside: its first four characters are `http` in any case.
pub fn is_external(url: &str) -> bool {
    url.get(..4).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http"))
}

/// A source for `url` as the client gave it; data URLs are checked later, by
/// [`check_data_urls`], once the whole message is converted.
pub fn source(url: String, detail: Detail, path: String) -> ImageSource {
    let data = if is_external(&url) { ImageData::Url(url) } else { ImageData::DataUrl(url) };
    ImageSource { data, detail, path }
}

/// Refuses an external link that is too long. `field` is the name shown before the words.
pub fn check_link(url: &str, location: impl FnOnce() -> String, field: &str) -> Result<(), Error> {
    if !is_external(url) || url.len() <= MAX_LINK_BYTES {
        return Ok(());
    }
    Err(bad(format!(
        "{}: {field}external link length {} too long, max link length {MAX_LINK_BYTES}. Consider \
         passing file data directly with base64 data url instead.",
        location(),
        url.len()
    )))
}

/// Checks every data URL among `images`, in order.
pub fn check_data_urls(images: &[ImageSource], prefix: impl Fn() -> String) -> Result<(), Error> {
    for image in images {
        if let ImageData::DataUrl(url) = &image.data {
            check_data_url(url).map_err(|text| bad(format!("{}: {text}", prefix())))?;
        }
    }
    Ok(())
}

fn check_data_url(url: &str) -> Result<(), &'static str> {
    const UNSUPPORTED_FORMAT: &str = "Unsupported image_url format";
    if is_plain_image_data_url(url) {
        return Ok(());
    }
    if !url.contains("base64,") {
        return Err(UNSUPPORTED_FORMAT);
    }
    let parsed = DataUrl::process(url).map_err(|_| UNSUPPORTED_FORMAT)?;
    if !is_image_type(&parsed) {
        return Err(
            "You have uploaded an unsupported image. Please make sure your image is valid \
                    and has one of the following formats: webp, png, jpeg, and gif.",
        );
    }
    if !is_decodable(&parsed) {
        return Err("Invalid base64 data");
    }
    Ok(())
}

fn is_image_type(url: &DataUrl) -> bool {
    let mime = url.mime_type();
    mime.type_.eq_ignore_ascii_case("image")
        && IMAGE_TYPES.iter().any(|subtype| mime.subtype.eq_ignore_ascii_case(subtype))
}

fn is_decodable(url: &DataUrl) -> bool {
    url.decode(|_| Ok::<(), std::convert::Infallible>(())).is_ok()
}

/// The common case, without the general parser: an exact prefix, then canonical base64.
///
/// A true answer implies that the general check accepts; a false one says nothing.
fn is_plain_image_data_url(url: &str) -> bool {
    let Some(rest) = url.strip_prefix("data:image/") else { return false };
    let Some((subtype, body)) = rest.split_once(";base64,") else { return false };
    if !IMAGE_TYPES.contains(&subtype) || !body.len().is_multiple_of(4) {
        return false;
    }
    let body = body.as_bytes();
    let num_padding = body.iter().rev().take(2).take_while(|byte| **byte == b'=').count();
    let (symbols, last) = match num_padding {
        0 => return body.iter().all(|byte| is_symbol(*byte)),
        _ => body.split_at(body.len() - num_padding - 1),
    };
    // The bits that padding leaves over must be zero for the strict decoder; let the general
    // parser judge the other cases.
    let is_canonical = if num_padding == 2 {
        b"AQgw".contains(&last[0])
    } else {
        b"AEIMQUYcgkosw048".contains(&last[0])
    };
    is_canonical && symbols.iter().all(|byte| is_symbol(*byte))
}

fn is_symbol(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/'
}

/// Checks a Chat `file` payload: any data URL that decodes, percent-encoded bodies included.
pub fn check_file_data(data: &str) -> Result<(), &'static str> {
    const INVALID: &str = "file_data is not a valid base64 data url";
    if is_plain_image_data_url(data) {
        return Ok(());
    }
    let parsed = DataUrl::process(data).map_err(|_| INVALID)?;
    if !is_image_type(&parsed) {
        return Err("You have uploaded an unsupported file. Please make sure your file is valid \
                    and has one of the following formats: webp, png, jpeg, and gif.");
    }
    if !is_decodable(&parsed) {
        return Err(INVALID);
    }
    Ok(())
}

/// Returns the data URL of a Messages base64 source, its padding repaired; `None` when the
/// payload does not decode strictly.
pub fn data_url_of_base64(media_type: &str, payload: &str) -> Option<String> {
    let repaired = repair_padding(payload);
    let payload = repaired.as_deref().unwrap_or(payload);
    let is_valid = is_canonical_base64(payload) || STANDARD.decode(payload).is_ok();
    is_valid.then(|| format!("data:{media_type};base64,{payload}"))
}

fn is_canonical_base64(payload: &str) -> bool {
    payload.len().is_multiple_of(4) && payload.bytes().all(is_symbol)
}

/// Pads a payload that ends with `=` canonically; `None` where it stays as it is.
fn repair_padding(payload: &str) -> Option<String> {
    let stripped = payload.trim_end_matches('=');
    let num_padding = payload.len() - stripped.len();
    let wanted = match stripped.len() % 4 {
        0 => 0,
        1 => return None,
        remainder => 4 - remainder,
    };
    if num_padding == 0 || num_padding == wanted {
        return None;
    }
    Some(format!("{stripped}{}", &"=="[..wanted]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fast_path_never_accepts_what_the_parser_refuses() {
        let mut num_fast = 0;
        let symbols = b"AQgwBEIM8=/+-. ";
        let mut body = String::new();
        for seed in 0u32..40_000 {
            body.clear();
            let mut state = seed;
            for _ in 0..(seed % 9) {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                body.push(symbols[(state >> 16) as usize % symbols.len()] as char);
            }
            let url = format!("data:image/png;base64,{body}");
            if is_plain_image_data_url(&url) {
                num_fast += 1;
                let parsed = DataUrl::process(&url).expect("parses");
                assert!(is_image_type(&parsed) && is_decodable(&parsed), "{url}");
            }
        }
        assert!(num_fast > 100, "the generator must reach the fast path, got {num_fast}");
    }

    #[test]
    fn padding_is_repaired_only_when_some_is_there() {
        assert_eq!(data_url_of_base64("image/png", "QQ"), None);
        assert_eq!(data_url_of_base64("image/png", "Q="), None);
        let repaired = Some("data:image/png;base64,QQ==".to_owned());
        for payload in ["QQ=", "QQ==", "QQ====="] {
            assert_eq!(data_url_of_base64("image/png", payload), repaired, "{payload}");
        }
        let full = Some("data:image/png;base64,QUJD".to_owned());
        assert_eq!(data_url_of_base64("image/png", "QUJD="), full);
    }
}
