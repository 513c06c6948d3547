import Foundation

/// A part of a message: text, or a picture for a model that sees images.
///
/// ```swift
/// client.chat([.user([.attachment(data: png, mimeType: "image/png"), .text("What is this?")])])
/// ```
public enum ContentPart: Sendable, Hashable {
    /// Text.
    case text(String)
    /// The bytes of a PNG, JPEG, WebP, GIF or BMP file. The server refuses other formats, and more than 20 MB.
    case attachment(data: Data, mimeType: String, detail: ImageDetail? = nil)
}

/// The share of a picture's pixels that the model gets.
public enum ImageDetail: String, Sendable, Hashable, Codable {
    case auto, low, high
}

extension ContentPart {
    /// The text, if this is one.
    public var text: String? {
        if case .text(let text) = self { text } else { nil }
    }

    /// The part in the shape of OpenAI's chat completions.
    var json: JSONValue {
        switch self {
        case .text(let text):
            return ["type": "text", "text": .string(text)]
        case .attachment(let data, let mimeType, let detail):
            var url: JSONObject = ["url": .string("data:\(mimeType);base64,\(data.base64EncodedString())")]
            url["detail"] = detail.map { .string($0.rawValue) }
            return ["type": "image_url", "image_url": .object(url)]
        }
    }

    /// The part in the shape of Anthropic's messages, whose endpoint counts tokens.
    var block: JSONValue {
        switch self {
        case .text(let text):
            return ["type": "text", "text": .string(text)]
        case .attachment(let data, let mimeType, _):
            let source: JSONObject = [
                "type": "base64", "media_type": .string(mimeType), "data": .string(data.base64EncodedString()),
            ]
            return ["type": "image", "source": .object(source)]
        }
    }
}

extension ContentPart: Codable {
    private enum Fields: String, CodingKey { case text, data, mimeType, detail }

    public init(from decoder: any Decoder) throws {
        let fields = try decoder.container(keyedBy: Fields.self)
        if let text = try fields.decodeIfPresent(String.self, forKey: .text) {
            self = .text(text)
        } else {
            let detail = try fields.decodeIfPresent(ImageDetail.self, forKey: .detail)
            let (data, type) = (try fields.decode(Data.self, forKey: .data), try fields.decode(String.self, forKey: .mimeType))
            self = .attachment(data: data, mimeType: type, detail: detail)
        }
    }

    public func encode(to encoder: any Encoder) throws {
        var fields = encoder.container(keyedBy: Fields.self)
        switch self {
        case .text(let text): try fields.encode(text, forKey: .text)
        case .attachment(let data, let mimeType, let detail):
            try fields.encode(data, forKey: .data)
            try fields.encode(mimeType, forKey: .mimeType)
            try fields.encodeIfPresent(detail, forKey: .detail)
        }
    }
}

#if canImport(ImageIO)
    import CoreGraphics
    import ImageIO

    extension ContentPart {
        /// A picture in memory, sent as PNG; nil if the system cannot encode it.
        public init?(_ image: CGImage, detail: ImageDetail? = nil) {
            let data = NSMutableData()
            guard let file = CGImageDestinationCreateWithData(data as CFMutableData, "public.png" as CFString, 1, nil) else { return nil }
            CGImageDestinationAddImage(file, image, nil)
            guard CGImageDestinationFinalize(file) else { return nil }
            self = .attachment(data: data as Data, mimeType: "image/png", detail: detail)
        }
    }
#endif
