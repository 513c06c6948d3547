import Foundation

#if canImport(ImageIO)
    import ImageIO
#endif

extension ContentPart {
    /// The most bytes of a picture that a server accepts.
    private static let limit = 20_000_000

    /// A picture in a file. PNG, JPEG, WebP, GIF and BMP are sent as they are. Apple's systems convert others, such as HEIC, to PNG.
    ///
    /// - Throws: ``MLXInferError/invalidRequest(_:)`` if the file cannot be read, is not a picture, or has more than 20 MB.
    public init(contentsOf file: URL, detail: ImageDetail? = nil) throws(MLXInferError) {
        let name = file.lastPathComponent
        let data: Data
        do {
            let values = try file.resourceValues(forKeys: [.fileSizeKey, .isRegularFileKey])
            guard values.isRegularFile == true else { throw MLXInferError.invalidRequest("\(name) is not a file") }
            guard (values.fileSize ?? 0) <= Self.limit else { throw MLXInferError.invalidRequest("\(name) has more than 20 MB") }
            data = try Data(contentsOf: file)
        } catch let error as MLXInferError {
            throw error
        } catch {
            throw .invalidRequest("\(name) cannot be read: \(error.localizedDescription)")
        }
        if let type = Self.mimeType([UInt8](data.prefix(12))) {
            self = .attachment(data: data, mimeType: type, detail: detail)
        } else if let picture = Self.converted(data, detail) {
            self = picture
        } else {
            throw .invalidRequest("\(name) is not a picture")
        }
    }

    /// The type of a picture that servers read, by its first bytes.
    package static func mimeType(_ head: [UInt8]) -> String? {
        if head.starts(with: [0x89, 0x50, 0x4E, 0x47]) { return "image/png" }
        if head.starts(with: [0xFF, 0xD8, 0xFF]) { return "image/jpeg" }
        if head.starts(with: "GIF8".utf8) { return "image/gif" }
        if head.starts(with: "RIFF".utf8), head.dropFirst(8).elementsEqual("WEBP".utf8) { return "image/webp" }
        let reserved = head.dropFirst(6).prefix(4)
        return head.starts(with: "BM".utf8) && reserved.elementsEqual([0, 0, 0, 0]) ? "image/bmp" : nil
    }

    private static func converted(_ data: Data, _ detail: ImageDetail?) -> ContentPart? {
        #if canImport(ImageIO)
            let source = CGImageSourceCreateWithData(data as CFData, nil)
            return source.flatMap { CGImageSourceCreateImageAtIndex($0, 0, nil) }.flatMap { ContentPart($0, detail: detail) }
        #else
            return nil
        #endif
    }
}
