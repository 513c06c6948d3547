import Foundation

/// What an event's data holds: a piece of an answer, or the server's error.
protocol AnswerChunk: Decodable {
    var error: JSONValue? { get }
}

/// The chunk that an event's data holds.
///
/// - Throws: ``MLXInferError/api(_:)`` where the event is an error of the server, ``HTTPFailure`` where it cannot be read.
func decodeChunk<Chunk: AnswerChunk>(_ type: Chunk.Type, _ data: [UInt8]) throws -> Chunk {
    do {
        let chunk = try JSONDecoder().decode(type, from: Data(data))
        guard let error = chunk.error, error != .null else { return chunk }
        throw MLXInferError.api(APIError(status: 200, body: try JSONDecoder().decode(ErrorBody.self, from: Data(data))))
    } catch let error as DecodingError {
        throw HTTPFailure.malformed("an event that cannot be read: \(error.reason)")
    }
}
