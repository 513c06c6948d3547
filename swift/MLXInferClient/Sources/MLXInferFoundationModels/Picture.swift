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
        if let url = image.url, url.isFileURL, let data = try? Data(contentsOf: url),
            let type = ContentPart.mimeType([UInt8](data.prefix(12)))
        {
            return .attachment(data: data, mimeType: type)
        }
        #if canImport(CoreImage)
            let upright = image.ciImage.oriented(image.orientation)
            return CIContext().createCGImage(upright, from: upright.extent).flatMap { ContentPart($0) }
        #else
            return nil
        #endif
    }
#endif
