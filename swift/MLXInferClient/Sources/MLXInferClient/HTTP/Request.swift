/// An HTTP/1.1 request for a connection of its own.
struct Request: Sendable, Equatable {
    var method = "GET"
    var path: String
    var accept = "application/json"
    var body: [UInt8]?

    /// The bytes to send.
    ///
    /// - Throws: ``MLXInferError/invalidRequest(_:)`` where the host or the key would break the header.
    func bytes(host: String, apiKey: String?) throws -> [UInt8] {
        var fields = ["Host: \(host)", "Accept: \(accept)", "User-Agent: MLXInferClient", "Connection: close"]
        if let apiKey { fields.append("Authorization: Bearer \(apiKey)") }
        if let body { fields += ["Content-Type: application/json", "Content-Length: \(body.count)"] }
        for field in fields where !field.utf8.allSatisfy({ (0x20..<0x7F).contains($0) }) {
            throw MLXInferError.invalidRequest("the \(field.prefix { $0 != ":" }) header would have a character that HTTP does not allow")
        }
        let head = "\(method) \(path) HTTP/1.1\r\n" + fields.map { $0 + "\r\n" }.joined() + "\r\n"
        return Array(head.utf8) + (body ?? [])
    }
}
