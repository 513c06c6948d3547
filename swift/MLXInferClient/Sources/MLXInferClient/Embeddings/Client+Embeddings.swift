import Foundation

extension Client {
    /// A vector of length 1 for each text, in their order.
    ///
    /// - Throws: ``MLXInferError/api(_:)`` from a model that is not for embeddings.
    public func embed(_ request: EmbeddingRequest) async throws -> [[Float]] {
        try await IOThread.result { waker in
            let exchange = exchange(waker)
            let body = request.json(model: try name(request.model, exchange))
            let list = try Self.post("/v1/embeddings", body, exchange, as: EmbeddingList.self).data
            let vectors = list.sorted { $0.index < $1.index }.compactMap(\.vector)
            guard vectors.count == request.texts.count, Set(vectors.map(\.count)).count <= 1 else {
                throw MLXInferError.protocolViolation("\(vectors.count) vectors came for \(request.texts.count) texts")
            }
            return vectors
        }
    }

    /// A vector of length 1 for each text, in their order.
    public func embed(_ texts: [String], model: String? = nil) async throws -> [[Float]] {
        try await embed(EmbeddingRequest(texts, model: model))
    }
}

struct EmbeddingList: Decodable {
    struct Row: Decodable {
        var index: Int
        /// Little-endian float32 in base64.
        var embedding: String

        var vector: [Float]? {
            guard let bytes = Data(base64Encoded: embedding), bytes.count.isMultiple(of: 4) else { return nil }
            return stride(from: 0, to: bytes.count, by: 4).map { start in
                Float(bitPattern: (0..<4).reduce(0) { $0 | UInt32(bytes[start + $1]) << (8 * $1) })
            }
        }
    }

    var data: [Row]
}
