import Foundation

/// What a model wrote, as a type.
func decodeAnswer<Value: Decodable>(_ text: String, as type: Value.Type) throws -> Value {
    do {
        return try JSONDecoder().decode(type, from: Data(text.utf8))
    } catch let error as DecodingError {
        throw MLXInferError.undecodableAnswer(text: text, reason: error.reason)
    }
}

extension DecodingError {
    /// One line: what is wrong, and where.
    var reason: String {
        switch self {
        case .keyNotFound(let key, let context): "\(Self.place(context)) has no \(key.stringValue)"
        case .valueNotFound(let type, let context): "\(Self.place(context)) has no value, expected \(type)"
        case .typeMismatch(let type, let context): "\(Self.place(context)) is not of type \(type)"
        case .dataCorrupted(let context):
            context.codingPath.isEmpty ? "not valid JSON" : "\(Self.place(context)): \(context.debugDescription)"
        @unknown default: "\(self)"
        }
    }

    private static func place(_ context: Context) -> String {
        let path = context.codingPath.map { $0.intValue.map { "[\($0)]" } ?? $0.stringValue }.joined(separator: ".")
        return path.isEmpty ? "the value" : path
    }
}
