#if canImport(FoundationModels, _version: 2)
    import Foundation
    import FoundationModels
    import MLXInferClient

    #if canImport(CoreImage)
        import CoreImage
    #endif

    /// A picture as the server takes it: the file if its format is one of the server's, or else its pixels, upright, as PNG. Nil for
    /// anything else.
    @available(macOS 27, iOS 27, visionOS 27, *)
    func picture(_ attachment: Transcript.Attachment) -> ContentPart? {
        guard case .image(let image) = attachment else { return nil }
        if let url = image.url, url.isFileURL, let data = try? Data(contentsOf: url), let type = pictureType(data) {
            return .attachment(data: data, mimeType: type)
        }
        #if canImport(CoreImage)
            let upright = image.ciImage.oriented(image.orientation)
            return CIContext().createCGImage(upright, from: upright.extent).flatMap { ContentPart($0) }
        #else
            return nil
        #endif
    }

    /// The type of a file of one of the server's formats, by its first bytes.
    func pictureType(_ data: Data) -> String? {
        let first = [UInt8](data.prefix(12))
        if first.starts(with: [0x89, 0x50, 0x4E, 0x47]) { return "image/png" }
        if first.starts(with: [0xFF, 0xD8, 0xFF]) { return "image/jpeg" }
        if first.starts(with: Array("GIF8".utf8)) { return "image/gif" }
        if first.starts(with: Array("BM".utf8)) { return "image/bmp" }
        return first.starts(with: Array("RIFF".utf8)) && first.dropFirst(8).elementsEqual("WEBP".utf8) ? "image/webp" : nil
    }
#endif
